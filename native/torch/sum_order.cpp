#include "native/torch/sum_order.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <numeric>
#include <random>
#include <vector>

#include "native/base/error.hpp"
#include "native/torch/few_rows.hpp"

namespace tierstore {
namespace {

// Rows of the matrix that differ: so many outputs of random bits agree in no two orders.
constexpr std::size_t kDistinctRows = 64;

// A matrix of many rows whose memory is that of a few, mapped again and again.
class RepeatedRows {
public:
    // The rows that differ are a multiple of kDistinctRows.
    RepeatedRows(std::size_t rows, std::size_t columns) {
        const std::size_t row_bytes = columns * sizeof(std::uint16_t);
        const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
        distinct_ = std::lcm(kDistinctRows * row_bytes, page) / row_bytes;
        const std::size_t bytes = distinct_ * row_bytes;
        count_ = (rows + distinct_ - 1) / distinct_;
        const int fd = memfd_create("tierstore-rows", MFD_CLOEXEC);
        if (fd < 0) throw SyscallError(errno, "memfd_create");
        bytes_ = count_ * bytes;
        void* whole = mmap(nullptr, bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        bool mapped = whole != MAP_FAILED && ftruncate(fd, static_cast<off_t>(bytes)) == 0;
        for (std::size_t i = 0; mapped && i < count_; ++i) {
            mapped = mmap(static_cast<char*>(whole) + i * bytes, bytes, PROT_READ | PROT_WRITE,
                          MAP_SHARED | MAP_FIXED, fd, 0) != MAP_FAILED;
        }
        const int error = errno;
        close(fd);
        if (!mapped) {
            if (whole != MAP_FAILED) munmap(whole, bytes_);
            throw SyscallError(error, "mmap");
        }
        data_ = static_cast<std::uint16_t*>(whole);
    }
    ~RepeatedRows() { munmap(data_, bytes_); }
    RepeatedRows(const RepeatedRows&) = delete;
    RepeatedRows& operator=(const RepeatedRows&) = delete;

    std::uint16_t* data() const { return data_; }
    std::size_t distinct() const { return distinct_; }

private:
    std::uint16_t* data_ = nullptr;
    std::size_t distinct_ = 0, count_ = 0, bytes_ = 0;
};

// Values of either sign and of magnitudes so different that sums of their products are rounded.
std::uint16_t draw(std::mt19937& random) {
    const std::uint32_t bits = random();
    const std::uint32_t exponent = 121 + bits % 12;  // of magnitudes from 1/64 to 64
    return static_cast<std::uint16_t>((bits >> 16 & 0x807f) | exponent << 7);
}

constexpr std::uint16_t kSign = 0x8000;

}  // namespace

std::size_t find_run(std::size_t rows, std::size_t n, std::size_t k, const MultiplyBf16& torch) {
    std::mt19937 random(1);
    std::vector<std::size_t> columns(k);
    std::iota(columns.begin(), columns.end(), 0);
    std::shuffle(columns.begin(), columns.end(), random);
    const RepeatedRows w(n, k);
    std::vector<std::uint16_t> x(rows * k), theirs(rows * n), ours(rows * n);
    for (std::size_t i = 0; i < k; i += 2) {
        const std::size_t one = columns[i], other = columns[i + 1];
        for (std::size_t m = 0; m < rows; ++m) x[m * k + one] = x[m * k + other] = draw(random);
        for (std::size_t row = 0; row < w.distinct(); ++row) {
            const std::uint16_t value = draw(random);
            w.data()[row * k + one] = value;
            w.data()[row * k + other] = value ^ kSign;
        }
    }
    torch(theirs.data(), x.data(), w.data());
    for (std::size_t candidate : {512, 1024, 256, 2048, 4096, 128, 64}) {
        const std::size_t run = std::min(candidate, k);
        const FewRowsProduct product{ours.data(), x.data(), w.data(), rows, run};
        multiply_few_rows({&product, 1}, n, k, nullptr, 1);
        if (ours == theirs) return run;
    }
    return 0;
}

}  // namespace tierstore
