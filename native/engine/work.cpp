#include "native/engine/work.hpp"

#include <algorithm>
#include <array>
#include <cstring>
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

Work accumulate_work(Buffer dst, Buffer src, Dtype src_dtype) {
    const size_t unit = src_dtype == Dtype::Fp32 ? 4 : 2;
    require(src.nbytes() % unit == 0, "accumulate: src is not a whole number of elements");
    const size_t numel = src.nbytes() / unit;
    require_elements(dst, 4, numel, "accumulate: dst");
    require_elements(src, unit, numel, "accumulate: src");
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

Work sum_of_squares_work(Buffer src, std::shared_ptr<DoubleTable> out, size_t index) {
    require_elements(src, 4, src.nbytes() / 4, "sum_of_squares: src");
    require(index < out->size(), "sum_of_squares: index is outside the table");
    return [src = std::move(src), out = std::move(out), index] {
        // In blocks of a fixed size from the start of the content, summed in order: where the spans lie must
        // not change the result. A block that a span divides is put together first.
        constexpr size_t kBlock = 16384;  // bytes
        alignas(64) std::array<std::byte, kBlock> joined;
        double sum = 0;
        Cursor at(src);
        for (size_t left = src.nbytes(); left > 0;) {
            const size_t n = std::min(kBlock, left);
            if (at.here() >= n) {
                sum += sum_of_squares(at.as<const float>(), n / 4);
                at.advance(n);
            } else {
                for (size_t filled = 0; filled < n;) {
                    const size_t piece = std::min(at.here(), n - filled);
                    std::memcpy(joined.data() + filled, at.data(), piece);
                    at.advance(piece);
                    filled += piece;
                }
                sum += sum_of_squares(reinterpret_cast<const float*>(joined.data()), n / 4);
            }
            left -= n;
        }
        out->store(index, sum);
    };
}

namespace {

struct AdamWTask {
    AdamWRecord record;
    std::vector<AdamWStep> steps;
    float grad_scale;
    bool split;

    void run(size_t begin, size_t end) const {
        const size_t weight_unit = split ? 2 : 4;
        Cursor first(record.weight.front()), second(record.weight.back());
        Cursor exp_avg(record.exp_avg), exp_avg_sq(record.exp_avg_sq);
        const bool has_grad = !record.grad.empty();
        Cursor grad(has_grad ? record.grad.front() : record.exp_avg);
        first.skip(begin * weight_unit);
        second.skip(begin * weight_unit);
        for (Cursor* cursor : {&exp_avg, &exp_avg_sq, &grad}) cursor->skip(begin * 4);
        for (size_t left = end - begin; left > 0;) {
            const size_t n = std::min({left, first.here() / weight_unit, second.here() / weight_unit,
                                       exp_avg.here() / 4, exp_avg_sq.here() / 4, grad.here() / 4});
            const AdamWSpan span{
                .weight = split ? nullptr : first.as<float>(),
                .weight_hi = split ? first.as<uint16_t>() : nullptr,
                .weight_lo = split ? second.as<int16_t>() : nullptr,
                .exp_avg = exp_avg.as<float>(),
                .exp_avg_sq = exp_avg_sq.as<float>(),
                .grad = has_grad ? grad.as<const float>() : nullptr,
                .numel = n,
            };
            adamw(span, steps, grad_scale);
            first.advance(n * weight_unit);
            second.advance(n * weight_unit);
            for (Cursor* cursor : {&exp_avg, &exp_avg_sq, &grad}) cursor->advance(n * 4);
            left -= n;
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
    require(record.exp_avg.nbytes() % 4 == 0, "adamw: exp_avg is not a whole number of elements");
    const bool split = record.weight.size() == 2;
    const size_t numel = record.exp_avg.nbytes() / 4;
    for (const Buffer& part : record.weight) require_elements(part, split ? 2 : 4, numel, "adamw: weight");
    require_elements(record.exp_avg, 4, numel, "adamw: exp_avg");
    require_elements(record.exp_avg_sq, 4, numel, "adamw: exp_avg_sq");
    for (const Buffer& part : record.grad) require_elements(part, 4, numel, "adamw: grad");
    // Less than this in a part, elements times steps, and waking another thread costs more than it saves.
    constexpr size_t kPartWork = size_t{1} << 19;
    constexpr size_t kWhole = 1024;  // parts begin at multiples: no cache line belongs to two
    const size_t parts = std::clamp<size_t>(numel * steps.size() / kPartWork, 1, most_parts);
    const size_t each = round_up((numel + parts - 1) / parts, kWhole);
    const auto task =
        std::make_shared<AdamWTask>(AdamWTask{std::move(record), std::move(steps), grad_scale, split});
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
