// One-dimensional arrays passed to and from Python without a copy.
#pragma once

#include <nanobind/ndarray.h>

#include <span>
#include <utility>
#include <vector>

template <typename T>
using Column = nanobind::ndarray<const T, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;

template <typename T>
std::span<const T> span_of(const Column<T>& array) {
    return std::span(array.data(), array.shape(0));
}

template <typename T>
using Numpy = nanobind::ndarray<nanobind::numpy, T, nanobind::ndim<1>>;

// An array that owns the values.
template <typename T>
Numpy<T> numpy(std::vector<T>&& values) {
    auto* owned = new std::vector<T>(std::move(values));
    nanobind::capsule owner(owned, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
    return Numpy<T>(owned->data(), {owned->size()}, owner);
}
