// What operations do on the engine's compute threads, as closures over the buffers that they keep alive. Each function
// checks its arguments at once (std::invalid_argument) and returns the work.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "native/io/file.hpp"
#include "native/memory/buffer.hpp"
#include "native/memory/table.hpp"
#include "native/optim/adamw.hpp"

namespace tierstore {

using Work = std::function<void()>;

enum class Dtype { Fp32, Bf16 };

// The sections of one vectored transfer. In the file they follow one another, each padded to `align`.
struct Transfer {
    OpenFilePtr file;
    uint64_t offset = 0;
    std::vector<Buffer> sections;
    std::shared_ptr<CrcTable> crcs;  // null: no checksums
    size_t first_crc = 0;            // section i has crcs[first_crc + i]
    size_t align = 4096;
};

// The memory of a transfer, sections padded, adjacent pieces merged.
std::vector<Span> transfer_spans(const Transfer& transfer);
// Throws ChecksumMismatch at the first section that does not match its checksum.
void verify_checksums(const Transfer& transfer);
// Whether a write has a checksum to store or padding to zero; if not, it needs no compute thread.
bool needs_seal(const Transfer& transfer);
// Zeroes the padding and stores each section's checksum.
void seal(const Transfer& transfer);

// verify_checksums of sections that lie in a mapping of the file, whose pages it touches first: a drive's error is a
// SyscallError.
Work verify_mapped_work(Transfer transfer);
// dst and src have equal sizes and do not overlap.
Work copy_work(Buffer dst, Buffer src);
Work fill_zero_work(Buffer dst);
// dst = src; dst is fp32, src of `src_dtype`.
Work widen_work(Buffer dst, Buffer src, Dtype src_dtype);
// dst += src, likewise.
Work accumulate_work(Buffer dst, Buffer src, Dtype src_dtype);
// out[index] = the sum of squares of src, in an order that does not depend on its spans or `src_dtype`.
Work sum_of_squares_work(Buffer src, Dtype src_dtype, std::shared_ptr<DoubleTable> out, size_t index);

struct AdamWRecord {
    std::vector<Buffer> weight;  // {fp32}, or {bf16 rounding, int16 remainder}
    Buffer exp_avg;              // of the format's type
    Buffer exp_avg_sq;
    std::vector<Buffer> scales;  // Int8: {exp_avg's, exp_avg_sq's}, fp32, one per block; otherwise none
    std::vector<Buffer> grad;    // {fp32} or {bf16}, as its size says, or none: zero gradient
    MomentFormat format = MomentFormat::Fp32;
    uint64_t record_hash = 0;  // narrow moments are rounded by it ...
    uint64_t last_step = 0;    // ... and by the number of each step; this is the last one
    // If there is a table, squares[squares_index] = what sum_of_squares_work gives for grad.
    std::shared_ptr<DoubleTable> squares = nullptr;
    size_t squares_index = 0;
};

// One or more AdamW steps over a record in one pass; all but the last have zero gradient. Long ones are cut into up to
// `most_parts` pieces for as many threads, between blocks: blocks are independent, so the bits are the same. Sections
// may have spans of any shape: a block that a span boundary divides is assembled for the step.
std::vector<Work> adamw_work(AdamWRecord record, std::vector<AdamWStep> steps, float grad_scale,
                             size_t most_parts);

// Flushes subnormals to zero on this thread.
void flush_subnormals();

}  // namespace tierstore
