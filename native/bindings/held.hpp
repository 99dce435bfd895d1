// How Python holds native objects that operations keep alive.
#pragma once

#include <memory>
#include <utility>

// Python owns the holder, and the holder shares the object. Not nanobind's own shared_ptr conversion: its copies hold
// a reference to the Python object, and a worker thread that drops the last one would need the interpreter.
template <class T>
struct Held {
    std::shared_ptr<T> ptr;

    template <class... Args>
    static Held make(Args&&... args) {
        return {std::make_shared<T>(std::forward<Args>(args)...)};
    }
};
