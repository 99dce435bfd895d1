#include "native/base/cpu.hpp"

namespace tierstore {

InstructionSet best_instruction_set() { return InstructionSet::Scalar; }

}  // namespace tierstore
