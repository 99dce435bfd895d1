// CRC-32C (Castagnoli), continuing from a previous value.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tierstore {

uint32_t crc32c(const void* data, size_t n, uint32_t crc = 0);

}  // namespace tierstore
