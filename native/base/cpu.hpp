// The instruction set that the kernels use. Every kernel gives the same bits on each of them.
#pragma once

#include <string_view>

namespace tierstore {

enum class InstructionSet { Scalar, Avx2, Avx512 };

// Whether both the processor and the operating system (which must save the wide registers) support it.
bool supports(InstructionSet isa);

// The best supported one, or the one named by the environment's TIERSTORE_ISA (scalar, avx2 or avx512). Read once.
// Throws std::invalid_argument if it names an unknown or unsupported one.
InstructionSet best_instruction_set();

// "scalar", "avx2", "avx512".
std::string_view name(InstructionSet isa);

// The carry-less multiplications that crc32c uses, which are separate from the instruction set.
bool supports_pclmul();
bool supports_vpclmul();

// Products of bf16 that are summed in fp32 (AVX512_BF16).
bool supports_avx512_bf16();

}  // namespace tierstore
