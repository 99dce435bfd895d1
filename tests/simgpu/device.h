// What the parts of the simulated device use of each other.

#pragma once

#include <ATen/core/Tensor.h>

#include "checker.h"
#include "recorder.h"

namespace simgpu {

constexpr int DEVICES = 8;

int current_device();
void set_device(int device);
int64_t current_stream(int device);
int64_t new_stream();
// Bytes that the device has from now on.
void set_memory(int device, size_t nbytes);
void register_hooks();
// Whether products of bf16 matrices are made in fp32 and rounded once: the CPU's own are slow without AVX-512.
void widen_products(bool widen);

bool on_device(const at::Tensor& tensor);
// The bytes between a tensor's first element and its last.
Span span_of(const at::Tensor& tensor, Mode mode);
// The tensor's memory is not given again before the host has seen the stream do what is queued there.
void used_by(const at::Tensor& tensor, int64_t stream);
// The memory of a tensor on the device as one on the host.
at::Tensor as_cpu(const at::Tensor& tensor);

}  // namespace simgpu
