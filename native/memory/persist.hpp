// Copies into persistent memory that bypass the caches, so that nothing is left to flush.
#pragma once

#include <cstddef>

namespace tierstore {

// Whether user code can write back cache lines on this processor.
bool can_persist();

// As memcpy; when it returns, every byte is on its way to memory, behind a fence: durable if the mapping is
// synchronous and the platform flushes its write queues (ADR). Partly written lines go through the cache and are
// written back (clwb, clflushopt or clflush, whichever the processor has).
void persist_bytes(void* dst, const void* src, size_t n);

}  // namespace tierstore
