// Which tickets have failed, and why, in bounded memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

#include "native/base/error.hpp"

namespace tierstore {

using Ticket = std::uint64_t;  // from 1 on, in order of submission

// A ticket may be waited for, or named as a dependency, twice, late or never, so nothing says when its failure is no
// longer needed. What is kept shrinks in two stages, and a failure never turns into a success:
//
// - the newest `errors` failures are kept with their error; older ones are raised as ResultForgotten;
// - the newest `tickets` of those are kept by number. Beyond that the engine has lost track: every ticket up to the
//   newest dropped one counts as failed. A success that old is refused, since it cannot be told apart.
//
// With the defaults that takes a million failures, and at most 10 MiB.
class FailedTickets {
public:
    explicit FailedTickets(std::size_t errors = 4096, std::size_t tickets = std::size_t{1} << 20)
        : most_errors_(errors), most_tickets_(tickets) {}

    void add(Ticket ticket, FailurePtr failure);
    // The failure of a finished ticket; null if it succeeded.
    FailurePtr find(Ticket ticket) const;
    std::size_t size() const { return errors_.size() + older_.size(); }

private:
    std::size_t most_errors_;
    std::size_t most_tickets_;
    std::map<Ticket, FailurePtr> errors_;
    std::vector<Ticket> older_;  // ascending, all after lost_
    Ticket lost_ = 0;            // this ticket and all before it count as failed
};

}  // namespace tierstore
