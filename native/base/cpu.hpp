// Which instruction sets this processor has.
#pragma once

namespace tierstore {

enum class InstructionSet { Scalar, Avx2, Avx512 };

InstructionSet best_instruction_set();

}  // namespace tierstore
