#include "native/base/cpu.hpp"

#include <cstdlib>
#include <stdexcept>
#include <string>

namespace tierstore {

// __builtin_cpu_supports asks XGETBV too, so a kernel that does not save zmm state counts as lacking
// AVX-512.
bool supports(InstructionSet isa) {
    __builtin_cpu_init();
    switch (isa) {
        case InstructionSet::Scalar: return true;
        case InstructionSet::Avx2: return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
        case InstructionSet::Avx512:
            return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                   __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
    }
    return false;
}

std::string_view name(InstructionSet isa) {
    switch (isa) {
        case InstructionSet::Scalar: return "scalar";
        case InstructionSet::Avx2: return "avx2";
        case InstructionSet::Avx512: return "avx512";
    }
    return "unknown";
}

namespace {

InstructionSet choose() {
    constexpr InstructionSet all[] = {InstructionSet::Avx512, InstructionSet::Avx2, InstructionSet::Scalar};
    const char* wanted = std::getenv("TIERSTORE_ISA");
    for (InstructionSet isa : all) {
        if (wanted != nullptr && *wanted != '\0') {
            if (name(isa) != wanted) continue;
            if (!supports(isa)) {
                throw std::invalid_argument(std::string("TIERSTORE_ISA: this machine lacks ") + wanted);
            }
            return isa;
        }
        if (supports(isa)) return isa;
    }
    throw std::invalid_argument(std::string("TIERSTORE_ISA: expected scalar, avx2 or avx512, got ") + wanted);
}

}  // namespace

InstructionSet best_instruction_set() {
    static const InstructionSet chosen = choose();
    return chosen;
}

bool supports_pclmul() {
    __builtin_cpu_init();
    return __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.2");
}

bool supports_vpclmul() {
    return supports_pclmul() && supports(InstructionSet::Avx512) && __builtin_cpu_supports("vpclmulqdq");
}

bool supports_avx512_bf16() {
    __builtin_cpu_init();
    return supports(InstructionSet::Avx512) && __builtin_cpu_supports("avx512bf16");
}

}  // namespace tierstore
