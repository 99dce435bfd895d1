// Which instruction set the kernels use. Every kernel gives the same bits on each of them.
#pragma once

#include <string_view>

namespace tierstore {

enum class InstructionSet { Scalar, Avx2, Avx512 };

// What both this processor and this operating system support (the latter must save the wide registers).
bool supports(InstructionSet isa);

// The best supported one, or the one that the environment's TIERSTORE_ISA (scalar, avx2 or avx512) names.
// Read once. Throws std::invalid_argument when it names none, or one that this machine lacks.
InstructionSet best_instruction_set();

// "scalar", "avx2", "avx512".
std::string_view name(InstructionSet isa);

// The carry-less multiplications that crc32c folds with, beside the instruction set.
bool supports_pclmul();
bool supports_vpclmul();

// Products of bf16 that are added up in fp32 (AVX512_BF16).
bool supports_avx512_bf16();

}  // namespace tierstore
