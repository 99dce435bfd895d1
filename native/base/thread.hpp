// The first step of every thread that tierstore starts.
#pragma once

#include <pthread.h>

#include <csignal>

namespace tierstore {

// Names the thread (at most 15 characters) and blocks all signals on it: the interpreter's main thread handles
// them.
inline void prepare_thread(const char* name) {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, nullptr);
    pthread_setname_np(pthread_self(), name);
}

}  // namespace tierstore
