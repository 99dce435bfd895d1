// CRC-32C (Castagnoli, RFC 3720 appendix B.4): the checksum of every record.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tierstore {

// Extends `crc`, the checksum of the preceding bytes, by these n bytes: crc32c("ab") == crc32c("b", crc32c("a")).
// The checksum of nothing is 0.
std::uint32_t crc32c(const void* data, std::size_t n, std::uint32_t crc = 0);

// The same by table look-up alone: the fallback, and the reference for the others.
std::uint32_t crc32c_scalar(const void* data, std::size_t n, std::uint32_t crc = 0);

// The checksum of a followed by b, from their checksums and b's length in bytes.
std::uint32_t crc32c_combine(std::uint32_t crc_a, std::uint32_t crc_b, std::uint64_t len_b);

// The method of crc32c: "vpclmul", "sse4.2" or "scalar".
const char* crc32c_method();

}  // namespace tierstore
