// Copies to shared memory that are done at once.
#pragma once

inline long long copied_bytes = 0;

inline void __pipeline_memcpy_async(void* to, const void* from, size_t bytes) {
    memcpy(to, from, bytes);
    copied_bytes += bytes;
}
inline void __pipeline_commit() {}
inline void __pipeline_wait_prior(int) {}
