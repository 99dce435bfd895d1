// Copies into persistent memory: past the caches, so that nothing is left to flush.
#pragma once

#include <cstddef>

namespace tierstore {

// Whether this processor's user code can write cache lines back.
bool can_persist();

// As memcpy, and once it returns every byte is on its way to the memory, behind a fence: durable where the
// mapping is synchronous and the platform flushes its write queues (ADR). Lines that are written in part go
// through the cache and are written back (clwb, clflushopt or clflush, whichever the processor has).
void persist_bytes(void* dst, const void* src, size_t n);

}  // namespace tierstore
