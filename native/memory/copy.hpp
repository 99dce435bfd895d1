// Copying and zeroing large pieces of memory.
#pragma once

#include <cstddef>

namespace tierstore {

// As memcpy. From 1 MiB on with stores that bypass the cache: what is copied there is not read again soon, and a
// plain store would read the destination's cache lines first.
void copy_bytes(void* dst, const void* src, size_t n);

// As memset to 0, likewise.
void zero_bytes(void* dst, size_t n);

}  // namespace tierstore
