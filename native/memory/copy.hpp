// Copying large pieces of memory.
#pragma once

#include <cstddef>

namespace tierstore {

// How a copy's stores use the cache. A streaming store bypasses it: it neither reads the destination's lines first nor
// evicts lines in use. Faster from about 1 MiB on, but the copy is then not in the cache.
enum class Stores { Cached, Streaming };

// For a copy of `total` bytes, however many pieces it is done in.
Stores stores_for(size_t total);

// As memcpy.
void copy_bytes(void* dst, const void* src, size_t n, Stores stores);

}  // namespace tierstore
