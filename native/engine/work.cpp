#include "native/engine/work.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>

#include "native/base/align.hpp"
#include "native/base/crc32c.hpp"
#include "native/base/error.hpp"
#include "native/memory/copy.hpp"

#ifdef __SSE2__
#include <xmmintrin.h>
#endif

namespace tierstore {
namespace {

// Walks a buffer's content; several in lockstep stop at whichever span ends first.
class Cursor {
public:
    explicit Cursor(const Buffer& buffer) : spans_(buffer.content()) {}

    size_t here() const { return at_ < spans_.size() ? spans_[at_].nbytes - within_ : 0; }
    std::byte* data() const { return spans_[at_].data + within_; }
    template <class T>
    T* as() const {
        return reinterpret_cast<T*>(data());
    }
    void skip(size_t nbytes) {
        while (nbytes > 0) {
            const size_t n = std::min(nbytes, here());
            advance(n);
            nbytes -= n;
        }
    }
    // The pieces of the next `nbytes`, passed over.
    template <class Call>
    void for_each(size_t nbytes, Call call) {
        while (nbytes > 0) {
            const size_t n = std::min(nbytes, here());
            call(data(), n);
            advance(n);
            nbytes -= n;
        }
    }
    void advance(size_t nbytes) {
        within_ += nbytes;
        if (at_ < spans_.size() && within_ == spans_[at_].nbytes) {
            ++at_;
            within_ = 0;
        }
    }

private:
    std::span<const Span> spans_;
    size_t at_ = 0;
    size_t within_ = 0;
};

void require(bool condition, const char* message) {
    if (!condition) throw std::invalid_argument(message);
}

// Elements of `unit` bytes, `numel` of them, none across a span's end.
void require_elements(const Buffer& buffer, size_t unit, size_t numel, const char* name) {
    if (buffer.nbytes() != numel * unit)
        throw std::invalid_argument(std::string(name) + ": expected " + std::to_string(numel * unit) +
                                    " bytes, got " + std::to_string(buffer.nbytes()));
    if (!buffer.divides(unit))
        throw std::invalid_argument(std::string(name) + ": its spans divide an element of " +
                                    std::to_string(unit) + " bytes");
}

uint32_t checksum(const Buffer& section) {
    uint32_t crc = 0;
    for (const Span& span : section.content()) crc = crc32c(span.data, span.nbytes, crc);
    return crc;
}

// Two runs of memory in step: call(dst, src, nbytes) for each stretch that is contiguous in both. `ratio` is
// how many bytes of dst go with one of src.
template <class Call>
void in_step(const Buffer& dst, const Buffer& src, size_t ratio, Call call) {
    Cursor to(dst), from(src);
    while (to.here() > 0) {
        const size_t n = std::min(to.here() / ratio, from.here());
        call(to.data(), from.data(), n);
        to.advance(n * ratio);
        from.advance(n);
    }
}

size_t bytes_of(Dtype dtype) { return dtype == Dtype::Fp32 ? 4 : 2; }

// dst of fp32 and src of `src_dtype` have equal numbers of elements; returns the bytes of one of src.
size_t require_widening(const Buffer& dst, const Buffer& src, Dtype src_dtype, const std::string& name) {
    const size_t unit = bytes_of(src_dtype), numel = src.nbytes() / unit;
    require(src.nbytes() % unit == 0, (name + ": src is not a whole number of elements").c_str());
    require_elements(dst, 4, numel, (name + ": dst").c_str());
    require_elements(src, unit, numel, (name + ": src").c_str());
    return unit;
}

}  // namespace

std::vector<Span> transfer_spans(const Transfer& transfer) {
    std::vector<Span> spans;
    for (const Buffer& section : transfer.sections) {
        for (const Span& span : section.room(round_up(section.nbytes(), transfer.align))) {
            if (!spans.empty() && spans.back().data + spans.back().nbytes == span.data) {
                spans.back().nbytes += span.nbytes;
            } else {
                spans.push_back(span);
            }
        }
    }
    return spans;
}

void verify_checksums(const Transfer& transfer) {
    uint64_t at = transfer.offset;
    for (size_t i = 0; i < transfer.sections.size(); ++i) {
        const Buffer& section = transfer.sections[i];
        const uint32_t actual = checksum(section);
        const uint32_t expected = transfer.crcs->load(transfer.first_crc + i);
        if (actual != expected) throw ChecksumMismatch(transfer.file->path, at, i, expected, actual);
        at += round_up(section.nbytes(), transfer.align);
    }
}

bool needs_seal(const Transfer& transfer) {
    return transfer.crcs || std::any_of(transfer.sections.begin(), transfer.sections.end(),
                                        [&](const Buffer& s) { return s.nbytes() % transfer.align != 0; });
}

void seal(const Transfer& transfer) {
    for (size_t i = 0; i < transfer.sections.size(); ++i) {
        const Buffer& section = transfer.sections[i];
        section.zero_padding(round_up(section.nbytes(), transfer.align));
        if (transfer.crcs) transfer.crcs->store(transfer.first_crc + i, checksum(section));
    }
}

Work verify_mapped_work(Transfer transfer) {
    return [transfer = std::move(transfer)] {
        for (const Buffer& section : transfer.sections) {
            for (const Span& span : section.content()) {
                const int err = populate_pages(span.data, span.nbytes, Touch::Read);
                if (err == 0) continue;
                SyscallError error(err, "read of mapped bytes", transfer.file->path);
                error.file_offset = static_cast<int64_t>(transfer.offset);
                throw error;
            }
        }
        verify_checksums(transfer);
    };
}

Work copy_work(Buffer dst, Buffer src) {
    require(dst.nbytes() == src.nbytes(), "copy: dst and src differ in size");
    return [dst = std::move(dst), src = std::move(src)] {
        const Stores stores = stores_for(dst.nbytes());
        in_step(dst, src, 1, [stores](std::byte* to, const std::byte* from, size_t n) {
            copy_bytes(to, from, n, stores);
        });
    };
}

Work fill_zero_work(Buffer dst) {
    return [dst = std::move(dst)] {
        for (const Span& span : dst.content()) std::memset(span.data, 0, span.nbytes);
    };
}

Work widen_work(Buffer dst, Buffer src, Dtype src_dtype) {
    require_widening(dst, src, src_dtype, "widen");
    if (src_dtype == Dtype::Fp32) return copy_work(std::move(dst), std::move(src));
    return [dst = std::move(dst), src = std::move(src)] {
        in_step(dst, src, 2, [](std::byte* to, std::byte* from, size_t n) {
            widen_bf16(reinterpret_cast<float*>(to), reinterpret_cast<const uint16_t*>(from), n / 2);
        });
    };
}

Work accumulate_work(Buffer dst, Buffer src, Dtype src_dtype) {
    const size_t unit = require_widening(dst, src, src_dtype, "accumulate");
    return [dst = std::move(dst), src = std::move(src), unit] {
        in_step(dst, src, 4 / unit, [unit](std::byte* to, std::byte* from, size_t n) {
            if (unit == 4) {
                accumulate(reinterpret_cast<float*>(to), reinterpret_cast<const float*>(from), n / 4);
            } else {
                accumulate_bf16(reinterpret_cast<float*>(to), reinterpret_cast<const uint16_t*>(from), n / 2);
            }
        });
    };
}

namespace {

// A sum of squares is made in blocks of a fixed size from the start of the content, added in order: neither where the
// spans lie nor what runs beside it changes the result.
constexpr size_t kSquaresBlock = 4096;  // elements

// The sum of squares of the next `n` elements, at most a block, which are passed over. A block of bf16, or that a span
// divides, is put together first.
double next_squares(Cursor& at, size_t unit, size_t n) {
    if (unit == 4 && at.here() >= n * unit) {
        const double sum = sum_of_squares(at.as<const float>(), n);
        at.advance(n * unit);
        return sum;
    }
    alignas(64) std::array<float, kSquaresBlock> joined;
    float* to = joined.data();
    at.for_each(n * unit, [&to, unit](std::byte* piece, size_t nbytes) {
        if (unit == 4) {
            std::memcpy(to, piece, nbytes);
        } else {
            widen_bf16(to, reinterpret_cast<const uint16_t*>(piece), nbytes / unit);
        }
        to += nbytes / unit;
    });
    return sum_of_squares(joined.data(), n);
}

}  // namespace

Work sum_of_squares_work(Buffer src, Dtype src_dtype, std::shared_ptr<DoubleTable> out, size_t index) {
    const size_t unit = bytes_of(src_dtype);
    require_elements(src, unit, src.nbytes() / unit, "sum_of_squares: src");
    require(index < out->size(), "sum_of_squares: index is outside the table");
    return [src = std::move(src), out = std::move(out), index, unit] {
        double sum = 0;
        Cursor at(src);
        for (size_t left = src.nbytes() / unit; left > 0;) {
            const size_t n = std::min(kSquaresBlock, left);
            sum += next_squares(at, unit, n);
            left -= n;
        }
        out->store(index, sum);
    };
}

namespace {

size_t moment_bytes(MomentFormat format) {
    switch (format) {
        case MomentFormat::Int8: return 1;
        case MomentFormat::Bf16: return 2;
        case MomentFormat::Fp32: break;
    }
    return 4;
}

constexpr size_t kMostSections = 7;

// One section of a record in the course of a step: `bytes` for every `each` elements.
struct SectionCursor {
    Cursor at;
    size_t bytes, each;

    size_t nbytes(size_t numel) const { return (numel + each - 1) / each * bytes; }
    size_t here() const { return at.here() / bytes * each; }
};

// The gradient's sum of squares: each block's, and the parts of the record that have yet to add theirs.
struct Squares {
    std::vector<double> blocks;
    std::atomic<size_t> parts_left;
};

struct AdamWTask {
    AdamWRecord record;
    std::vector<AdamWStep> steps;
    float grad_scale;
    bool split;
    size_t grad_bytes;  // of one element
    std::unique_ptr<Squares> squares = nullptr;

    // weight (or its halves), exp_avg, exp_avg_sq, then the scales and the gradient if there are any.
    std::vector<SectionCursor> sections(size_t begin) const {
        const size_t moment = moment_bytes(record.format);
        std::vector<SectionCursor> all;
        for (const Buffer& part : record.weight) all.push_back({Cursor(part), split ? 2u : 4u, 1});
        all.push_back({Cursor(record.exp_avg), moment, 1});
        all.push_back({Cursor(record.exp_avg_sq), moment, 1});
        for (const Buffer& part : record.scales) all.push_back({Cursor(part), 4, kMomentBlock});
        for (const Buffer& part : record.grad) all.push_back({Cursor(part), grad_bytes, 1});
        for (SectionCursor& section : all) section.at.skip(section.nbytes(begin));
        return all;
    }

    void step(const std::vector<std::byte*>& data, size_t first, size_t numel) const {
        auto next = data.begin();
        AdamWSpan span{};
        if (split) {
            span.weight_hi = reinterpret_cast<uint16_t*>(*next++);
            span.weight_lo = reinterpret_cast<int16_t*>(*next++);
        } else {
            span.weight = reinterpret_cast<float*>(*next++);
        }
        span.moments.format = record.format;
        span.moments.exp_avg = *next++;
        span.moments.exp_avg_sq = *next++;
        if (!record.scales.empty()) {
            span.moments.exp_avg_scale = reinterpret_cast<float*>(*next++);
            span.moments.exp_avg_sq_scale = reinterpret_cast<float*>(*next++);
        }
        if (!record.grad.empty()) {
            if (grad_bytes == 4) {
                span.grad = reinterpret_cast<const float*>(*next++);
            } else {
                span.grad_bf16 = reinterpret_cast<const uint16_t*>(*next++);
            }
        }
        span.numel = numel;
        adamw(span, steps, grad_scale, {record.record_hash, record.last_step, first});
    }

    // A block that some span divides: its sections' pieces are put together, stepped and put back.
    void step_joined(std::vector<SectionCursor>& all, size_t first, size_t numel) const {
        alignas(64) std::array<std::array<std::byte, kMomentBlock * 4>, kMostSections> joined;
        std::vector<std::byte*> data;
        for (const SectionCursor& section : all) {
            std::byte* to = joined[data.size()].data();
            data.push_back(to);
            Cursor from = section.at;
            from.for_each(section.nbytes(numel), [&to](std::byte* piece, size_t n) {
                std::memcpy(to, piece, n);
                to += n;
            });
        }
        step(data, first, numel);
        for (size_t i = 0; i < all.size(); ++i) {
            const std::byte* from = joined[i].data();
            const bool gradient = i + record.grad.size() == all.size();  // only read: others may read it too
            all[i].at.for_each(all[i].nbytes(numel), [&from, gradient](std::byte* piece, size_t n) {
                if (!gradient) std::memcpy(piece, from, n);
                from += n;
            });
        }
    }

    // Elements from `begin`, which begins a block, to `end`, which ends one or the record.
    void run(size_t begin, size_t end) const {
        std::vector<SectionCursor> all = sections(begin);
        if (!squares) return step_until(all, begin, end);
        // So few that the gradient is still in the second-level cache when the step reads it.
        constexpr size_t kRun = 8 * kSquaresBlock;
        for (size_t at = begin; at < end; at += kRun) {
            const size_t until = std::min(at + kRun, end);
            Cursor grad = all.back().at;
            for (size_t from = at; from < until; from += kSquaresBlock) {
                const size_t n = std::min(kSquaresBlock, until - from);
                squares->blocks[from / kSquaresBlock] = next_squares(grad, grad_bytes, n);
            }
            step_until(all, at, until);
        }
        if (--squares->parts_left > 0) return;
        double sum = 0;
        for (const double block : squares->blocks) sum += block;
        record.squares->store(record.squares_index, sum);
    }

    void step_until(std::vector<SectionCursor>& all, size_t begin, size_t end) const {
        const size_t whole = record.format == MomentFormat::Int8 ? kMomentBlock : 1;
        std::vector<std::byte*> data(all.size());
        for (size_t at = begin; at < end;) {
            size_t n = end - at;
            for (const SectionCursor& section : all) n = std::min(n, section.here());
            if (n < end - at) n -= n % whole;
            if (n == 0) {
                n = std::min(whole, end - at);
                step_joined(all, at, n);
            } else {
                for (size_t i = 0; i < all.size(); ++i) data[i] = all[i].at.data();
                step(data, at, n);
                for (SectionCursor& section : all) section.at.skip(section.nbytes(n));
            }
            at += n;
        }
    }
};

}  // namespace

std::vector<Work> adamw_work(AdamWRecord record, std::vector<AdamWStep> steps, float grad_scale,
                             size_t most_parts) {
    require(record.weight.size() == 1 || record.weight.size() == 2,
            "adamw: weight is [fp32], or [bf16 rounding, int16 remainder]");
    require(record.grad.size() <= 1, "adamw: at most one gradient");
    require(!steps.empty(), "adamw: at least one step");
    const bool narrow = record.format == MomentFormat::Int8;
    require(record.scales.size() == (narrow ? 2 : 0),
            "adamw: scales are [of exp_avg, of exp_avg_sq] with 8-bit moments, and none without");
    const size_t moment = moment_bytes(record.format);
    require(record.exp_avg.nbytes() % moment == 0, "adamw: exp_avg is not a whole number of elements");
    const bool split = record.weight.size() == 2;
    const size_t numel = record.exp_avg.nbytes() / moment;
    for (const Buffer& part : record.weight) require_elements(part, split ? 2 : 4, numel, "adamw: weight");
    require_elements(record.exp_avg, moment, numel, "adamw: exp_avg");
    require_elements(record.exp_avg_sq, moment, numel, "adamw: exp_avg_sq");
    for (const Buffer& part : record.scales) require_elements(part, 4, moment_blocks(numel), "adamw: scales");
    size_t grad_bytes = 4;
    for (const Buffer& part : record.grad) {
        if (part.nbytes() == numel * 2) grad_bytes = 2;
        require_elements(part, grad_bytes, numel, "adamw: grad");
    }
    require(!record.squares || (numel > 0 && record.grad.size() == 1),
            "adamw: squares: there is no gradient");
    require(!record.squares || record.squares_index < record.squares->size(),
            "adamw: index is outside the table");
    // Less than this in a part, elements times steps, and waking another thread costs more than it saves.
    constexpr size_t kPartWork = size_t{1} << 19;
    constexpr size_t kWhole =
        4096;  // parts begin at multiples: neither a cache line nor a block belongs to two
    static_assert(kWhole % kMomentBlock == 0 && kWhole % kSquaresBlock == 0);
    const size_t parts = std::clamp<size_t>(numel * steps.size() / kPartWork, 1, most_parts);
    const size_t each = round_up((numel + parts - 1) / parts, kWhole);
    const auto task = std::make_shared<AdamWTask>(
        AdamWTask{std::move(record), std::move(steps), grad_scale, split, grad_bytes});
    if (task->record.squares) {
        task->squares = std::make_unique<Squares>(
            std::vector<double>((numel + kSquaresBlock - 1) / kSquaresBlock), (numel + each - 1) / each);
    }
    std::vector<Work> works;
    for (size_t begin = 0; begin < numel; begin += each) {
        works.push_back([task, begin, end = std::min(begin + each, numel)] { task->run(begin, end); });
    }
    return works;
}

void flush_subnormals() {
#ifdef __SSE2__
    _mm_setcsr(_mm_getcsr() | 0x8040);  // FTZ | DAZ
#endif
}

}  // namespace tierstore
