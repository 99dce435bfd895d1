// What every thread of ours does first.
#pragma once

#include <pthread.h>

#include <csignal>

namespace tierstore {

// Names the thread (at most 15 characters) and blocks all signals on it: they are the interpreter's main
// thread's.
inline void prepare_thread(const char* name) {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, nullptr);
    pthread_setname_np(pthread_self(), name);
}

}  // namespace tierstore
