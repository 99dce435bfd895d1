// Several threads submit random graphs of copies, fills, reads, writes, syncs, punches and holds, wait, cancel and
// close, each against an oracle that replays in ticket order whatever succeeded. Usage: stress_engine
// [BACKEND] [rounds], with a name of kIoBackends, or "all" of them
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "native/base/align.hpp"
#include "native/engine/engine.hpp"
#include "tests/native/check.hpp"

using namespace tierstore;
using namespace std::chrono_literals;

namespace {

using Random = std::mt19937;

constexpr size_t kCells = 12;  // of each thread, in memory
constexpr size_t kSlots = 8;   // of each thread, in its file
constexpr size_t kFrames = 5;  // of a cell: it is scattered over so many
constexpr size_t kContent = kFrames * kPageBytes - 100;
constexpr size_t kSubmitters = 3;

size_t pick(Random& random, size_t n) { return std::uniform_int_distribution<size_t>(0, n - 1)(random); }

std::string temporary(const std::string& name) {
    return "/var/tmp/tierstore-stress-" + std::to_string(getpid()) + "-" + name;
}

// The tickets that threads show one another, to make graphs that cross.
struct Board {
    std::atomic<Ticket> tickets[16] = {};

    void show(Random& random, Ticket ticket) { tickets[pick(random, 16)] = ticket; }
    Ticket look(Random& random) { return tickets[pick(random, 16)]; }
};

struct Step {
    enum Kind { Copy, Fill, Read, Write, Other } kind;
    Ticket ticket;
    size_t to, from;
};

class Submitter {
public:
    Submitter(Engine& engine, Board& board, std::shared_ptr<Link> link, unsigned seed)
        : engine_(engine),
          board_(board),
          link_(std::move(link)),
          random_(seed),
          arena_(std::make_shared<Arena>(kCells * kFrames * kPageBytes, HugePages::Off)),
          crcs_(std::make_shared<CrcTable>(kSlots)),
          path_(temporary(std::to_string(seed))),
          meter_(std::make_shared<Meter>()),
          file_(path_, FileCreate::Yes, DirectIo::Auto, FileAccess::ReadWrite, meter_),
          cell_values_(kCells),
          slot_values_(kSlots) {
        // One slot more, which is only ever given back.
        file_.allocate(0, (kSlots + 1) * kFrames * kPageBytes);
        std::vector<size_t> frames(kCells * kFrames);
        for (size_t i = 0; i < frames.size(); ++i) frames[i] = i * kPageBytes;
        std::shuffle(frames.begin(), frames.end(), random_);
        for (size_t i = 0; i < kCells; ++i) {
            std::vector<Buffer::Extent> extents;
            for (size_t j = 0; j < kFrames; ++j) extents.push_back({frames[i * kFrames + j], kPageBytes});
            cells_.emplace_back(arena_, extents, kContent);
            set_cell(i);
        }
        for (size_t i = 0; i < kSlots; ++i) {
            cell_tickets_.assign(kCells, 0);
            slot_tickets_.assign(kSlots, 0);
            engine_.wait(engine_.write(slot(i, i), {}), 1h);
            slot_values_[i] = cell_values_[i];
        }
    }
    ~Submitter() { ::unlink(path_.c_str()); }

    void round() {
        steps_.clear();
        for (size_t i = 0; i < kCells; ++i)
            if (pick(random_, 4) == 0) set_cell(i);
        std::vector<Ticket> externals;
        for (size_t n = 0; n < 60; ++n) {
            submit_one(externals);
            if (pick(random_, 12) == 0) engine_.cancel(steps_[pick(random_, steps_.size())].ticket);
            if (pick(random_, 16) == 0) engine_.promote(steps_[pick(random_, steps_.size())].ticket);
            if (pick(random_, 16) == 0) engine_.notify(steps_.back().ticket);
            if (pick(random_, 20) == 0) engine_.drain_notified();
            if (pick(random_, 30) == 0) engine_.stats();
            if (pick(random_, 30) == 0) engine_.drain_spans();
            if (pick(random_, 30) == 0) meter_->reading();
        }
        for (Ticket ticket : externals) engine_.complete_external(ticket);
        std::fill(cell_tickets_.begin(), cell_tickets_.end(), 0);
        std::fill(slot_tickets_.begin(), slot_tickets_.end(), 0);
        for (const Step& step : steps_)
            if (succeeded(step.ticket)) replay(step);
        verify();
    }

private:
    Transfer slot(size_t index, size_t cell) { return slot(index, cell, crcs_); }

    Transfer slot(size_t index, size_t cell, std::shared_ptr<CrcTable> crcs) {
        const uint64_t offset = index * kFrames * kPageBytes;
        return {file_.open(), offset, {cells_[cell]}, std::move(crcs), index, kPageBytes};
    }

    void set_cell(size_t i) {
        std::vector<std::byte> content(kContent, std::byte(1 + pick(random_, 255)));
        cell_values_[i] = content[0];
        cells_[i].scatter(content.data());
    }

    // Each part clears spans of its own; the last one to end, ends the operation.
    static std::vector<Work> fill_in_parts(const Buffer& cell, size_t parts) {
        std::vector<Work> works;
        for (size_t part = 0; part < parts; ++part) {
            works.push_back([cell, part, parts] {
                const auto spans = cell.content();
                for (size_t i = part; i < spans.size(); i += parts)
                    std::memset(spans[i].data, 0, spans[i].nbytes);
            });
        }
        return works;
    }

    // Everything that touches a cell or slot follows what touched it before.
    std::vector<Ticket> after(std::initializer_list<Ticket*> places) {
        std::vector<Ticket> tickets;
        for (Ticket* place : places)
            if (*place != 0) tickets.push_back(*place);
        if (pick(random_, 6) == 0)
            if (const Ticket other = board_.look(random_)) tickets.push_back(other);
        return tickets;
    }

    void submit_one(std::vector<Ticket>& externals) {
        const size_t to = pick(random_, kCells);
        const size_t from = (to + 1 + pick(random_, kCells - 1)) % kCells;
        const size_t index = pick(random_, kSlots);
        const auto priority = static_cast<Priority>(pick(random_, 4));
        Ticket ticket = 0;
        switch (pick(random_, 10)) {
            case 0:
            case 1:
            case 2: {
                const auto tickets = after({&cell_tickets_[to], &cell_tickets_[from]});
                ticket = engine_.compute(copy_work(cells_[to], cells_[from]), {tickets, priority});
                cell_tickets_[to] = cell_tickets_[from] = ticket;
                steps_.push_back({Step::Copy, ticket, to, from});
                break;
            }
            case 3: {
                const auto tickets = after({&cell_tickets_[to]});
                ticket =
                    engine_.compute(fill_in_parts(cells_[to], 1 + pick(random_, 4)), {tickets, priority});
                cell_tickets_[to] = ticket;
                steps_.push_back({Step::Fill, ticket, to, 0});
                break;
            }
            case 4:
            case 5: {
                const auto tickets = after({&cell_tickets_[to], &slot_tickets_[index]});
                ticket = engine_.write(slot(index, to), {tickets, priority});
                cell_tickets_[to] = slot_tickets_[index] = ticket;
                steps_.push_back({Step::Write, ticket, index, to});
                break;
            }
            case 6:
            case 7: {
                const auto tickets = after({&cell_tickets_[to], &slot_tickets_[index]});
                ticket = engine_.read(slot(index, to), {tickets, priority});
                cell_tickets_[to] = slot_tickets_[index] = ticket;
                steps_.push_back({Step::Read, ticket, to, index});
                break;
            }
            case 8: {
                if (pick(random_, 4) == 0) {
                    // Far beyond the end of the file: it fails before it moves a byte.
                    const auto tickets = after({&cell_tickets_[to]});
                    ticket = engine_.read(slot(1000 + index, to, nullptr), {tickets, priority});
                    cell_tickets_[to] = ticket;
                    steps_.push_back({Step::Other, ticket, 0, 0});
                    break;
                }
                const auto tickets = after({&slot_tickets_[index]});
                ticket = pick(random_, 3) == 0 ? engine_.punch(file_.open(), kSlots * kFrames * kPageBytes,
                                                               kFrames * kPageBytes, {tickets, priority})
                                               : engine_.sync(file_.open(), {tickets, priority});
                steps_.push_back({Step::Other, ticket, 0, 0});
                break;
            }
            default: {
                const auto tickets = after({&cell_tickets_[to], &cell_tickets_[from]});
                switch (pick(random_, 4)) {
                    case 0:
                        ticket = engine_.external({tickets, priority});
                        externals.push_back(ticket);
                        break;
                    case 1: {
                        const Label label{Activity::Other, pick(random_, 100'000)};
                        ticket = engine_.hold(link_, {tickets, priority}, label);
                        break;
                    }
                    default: ticket = engine_.barrier({tickets, priority});
                }
                cell_tickets_[to] = ticket;
                steps_.push_back({Step::Other, ticket, 0, 0});
                break;
            }
        }
        board_.show(random_, ticket);
    }

    bool succeeded(Ticket ticket) {
        try {
            while (!engine_.wait(ticket, 100ms)) std::this_thread::yield();
            CHECK(engine_.done(ticket));
            return true;
        } catch (const Cancelled&) {
            return false;
        } catch (const SyscallError& error) {
            CHECK(error.err == EIO);
            return false;
        }
    }

    void replay(const Step& step) {
        switch (step.kind) {
            case Step::Copy: cell_values_[step.to] = cell_values_[step.from]; break;
            case Step::Fill: cell_values_[step.to] = std::byte{0}; break;
            case Step::Read: cell_values_[step.to] = slot_values_[step.from]; break;
            case Step::Write: slot_values_[step.to] = cell_values_[step.from]; break;
            case Step::Other: break;
        }
    }

    void verify() {
        std::vector<std::byte> content(kContent);
        for (size_t i = 0; i < kCells; ++i) {
            cells_[i].gather(content.data());
            for (std::byte byte : content) CHECK(byte == cell_values_[i]);
        }
        for (size_t i = 0; i < kSlots; ++i) {
            const size_t cell = pick(random_, kCells);
            engine_.wait(engine_.read(slot(i, cell), {}), 1h);
            cells_[cell].gather(content.data());
            for (std::byte byte : content) CHECK(byte == slot_values_[i]);
            cell_values_[cell] = slot_values_[i];
        }
    }

    Engine& engine_;
    Board& board_;
    std::shared_ptr<Link> link_;
    Random random_;
    std::shared_ptr<Arena> arena_;
    std::shared_ptr<CrcTable> crcs_;
    std::string path_;
    std::shared_ptr<Meter> meter_;
    File file_;
    std::vector<Buffer> cells_;
    std::vector<std::byte> cell_values_, slot_values_;
    std::vector<Ticket> cell_tickets_, slot_tickets_;
    std::vector<Step> steps_;
};

EngineOptions options(IoBackend backend, unsigned seed) {
    EngineOptions options;
    options.backend = backend;
    options.io.threads = 1 + seed % 4;
    options.io.queue_depth = 1 + seed % 9;
    options.io.chunk_bytes = kPageBytes << (seed % 3);
    options.compute_threads = 1 + seed % 3;
    return options;
}

void random_graphs(IoBackend backend, unsigned rounds) {
    for (unsigned seed = 0; seed < 4; ++seed) {
        Engine engine(options(backend, seed));
        engine.record_spans(seed % 2 == 0 ? 100 : 0);
        Board board;
        // All submitters share it; so fast that the turns of a round are a few milliseconds.
        const auto link = std::make_shared<Link>(1e9, 1e-6);
        std::vector<std::thread> threads;
        for (unsigned i = 0; i < kSubmitters; ++i)
            threads.emplace_back([&, i] {
                Submitter submitter(engine, board, link, 1000 + 10 * seed + i);
                for (unsigned n = 0; n < rounds; ++n) submitter.round();
            });
        for (auto& thread : threads) thread.join();
        engine.close();
        CHECK(!engine.poisoned());
        CHECK(engine.stats().waiting == 0);
        CHECK(engine.stats().in_flight == 0);
    }
}

// Closing in the middle: every ticket ends, every thread learns it, nothing touches what is gone.
void closing(IoBackend backend, unsigned rounds) {
    const std::string path = temporary("close");
    {
        File file(path, FileCreate::Yes);
        file.allocate(0, 64 * kPageBytes);
    }
    for (unsigned round = 0; round < rounds; ++round) {
        auto engine = std::make_unique<Engine>(options(backend, round));
        std::vector<std::thread> threads;
        for (unsigned i = 0; i < kSubmitters; ++i)
            threads.emplace_back([&engine = *engine, &path, i, round] {
                Random random(100 * round + i);
                std::vector<Ticket> tickets;
                try {
                    for (;;) {
                        // The operations alone keep file and memory.
                        File file(path);
                        auto arena = std::make_shared<Arena>(4 * kPageBytes, HugePages::Off);
                        const Buffer cell(arena, {{0, 4 * kPageBytes}}, 4 * kPageBytes - 1);
                        const std::vector<Ticket> after(tickets.end() - (tickets.empty() ? 0 : 1),
                                                        tickets.end());
                        Transfer transfer{file.open(), 4 * kPageBytes * pick(random, 16), {cell}, nullptr, 0,
                                          512};
                        switch (pick(random, 5)) {
                            case 0: tickets.push_back(engine.read(transfer, {after})); break;
                            case 1: tickets.push_back(engine.write(transfer, {after})); break;
                            case 2: tickets.push_back(engine.compute(fill_zero_work(cell), {after})); break;
                            case 3: {
                                // Some end soon, others would after the program.
                                auto link = std::make_shared<Link>(1e9, pick(random, 2) ? 1e-5 : 1e5);
                                const Label label{Activity::Other, 1};
                                tickets.push_back(engine.hold(std::move(link), {after}, label));
                                break;
                            }
                            default: tickets.push_back(engine.external({after}));
                        }
                        if (pick(random, 5) == 0) engine.complete_external(engine.external({}));
                        if (pick(random, 50) == 0) engine.close();
                    }
                } catch (const EngineClosed&) {
                }
                for (Ticket ticket : tickets) {
                    try {
                        CHECK(engine.wait(ticket, 1h));
                    } catch (const EngineClosed&) {
                    }
                }
            });
        std::this_thread::sleep_for(std::chrono::microseconds(round * 37 % 2000));
        engine->close();
        for (auto& thread : threads) thread.join();
    }
    ::unlink(path.c_str());
}

}  // namespace

int main(int argc, char** argv) {
    const std::string asked = argc > 1 ? argv[1] : "all";
    const auto rounds = static_cast<unsigned>(argc > 2 ? std::atoi(argv[2]) : 20);
    unsigned passed = 0, skipped = 0;
    for (const KnownBackend& known : kIoBackends) {
        if (known.make == nullptr || (asked != "all" && asked != known.name)) continue;
        try {
            Engine probe(options(known.value, 1));
        } catch (const SyscallError& error) {
            std::printf("no %s here: %s\n", known.name, error.what());
            skipped += 2;
            continue;
        }
        random_graphs(known.value, rounds);
        closing(known.value, 4 * rounds);
        passed += 2;
    }
    if (passed + skipped == 0) {
        std::fprintf(stderr, "no I/O backend has the name %s\n", asked.c_str());
        return 2;
    }
    std::printf("%u passed, 0 failed, %u skipped\n", passed, skipped);
}
