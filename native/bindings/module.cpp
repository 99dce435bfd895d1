// tierstore._native: one bind_* function for each file of this directory.
#include "native/bindings/bindings.hpp"

NB_MODULE(_native, m) {
    // An uncaught exception at exit keeps frames, and with them our objects, alive: that is no leak to report.
    nanobind::set_leak_warnings(false);
    m.doc() = "tierstore's native core: arenas, files, the ticket engine, AdamW, cache residency, replay.";
    bind_base(m);
    bind_memory(m);
    bind_tables(m);
    bind_io(m);
    bind_optim(m);
    bind_quant(m);
    bind_torch(m);
    bind_engine(m);
    bind_python_policy(m);
    bind_cache(m);
    bind_sim(m);
}
