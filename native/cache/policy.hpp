// What a cache policy is: it sees the requests of one cache and names victims. Live cache and replay run the
// same objects, so a policy must be deterministic: no clock of its own, no unordered iteration.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace tierstore {

using EntryId = std::uint32_t;
inline constexpr std::uint32_t kGroupStride = 4;  // live, entry = record * kGroupStride + group

enum class Clock : std::uint8_t { REQUEST, STEP };

// Which part of the program an access belongs to.
enum class Phase : std::uint8_t { INIT, FORWARD, BACKWARD, OPTIMIZER, USER, EXPORT };

// What is known of an entry beforehand. Entries of one record are asked for by the same accesses, or some of them.
struct EntryInfo {
    std::uint32_t record;
    std::uint32_t group;  // which of the record's entries it is
    std::uint32_t layer;
    std::uint32_t frames;  // its size; 0 for one that never comes
};

// One atomic access as it begins: all of the entries that it will ask for.
struct AccessInfo {
    Phase phase;
    std::uint32_t layer;
    std::span<const EntryId> entries;
    std::span<const std::uint8_t>
        askers;  // of each entry, the sequences that go on from it, a bit each; or empty: nobody says
};

// What a policy may know of entries when it chooses: their size, and whether they can go at all.
struct Candidates {
    const std::uint32_t* frames;  // size of each entry, in frames
    const std::uint32_t* busy;    // non-zero: pinned or on hold, never a victim

    bool evictable(EntryId entry) const { return busy[entry] == 0; }
};

class Policy {
public:
    // headroom_frames: frames of the capacity that the policy wants left empty.
    explicit Policy(std::uint32_t headroom_frames = 0) : headroom_frames_(headroom_frames) {}
    Policy(const Policy&) = delete;
    Policy& operator=(const Policy&) = delete;
    virtual ~Policy() = default;

    // First of all, once: the frames that this policy's entries may occupy (its headroom excluded).
    virtual void set_capacity(std::uint64_t frames) { (void)frames; }
    // Before anything else is said of it: an entry that may be asked for.
    virtual void add(EntryId entry, const EntryInfo& info) { (void)entry, (void)info; }
    // Only for a policy that wants to know the program's schedule: each access as it begins (with layer scope
    // every layer's policy hears of all accesses).
    virtual bool follows_accesses() const { return false; }
    virtual void access(const AccessInfo& info) { (void)info; }

    // Not resident and wanted: room is made next, then comes insert() (for a guess, when somebody asks for it,
    // or never). A policy with ghosts looks for the ghost here, before its victims become ghosts themselves.
    virtual void miss(EntryId entry) { (void)entry; }
    virtual void insert(EntryId entry) = 0;  // became resident (a request, or a prefetch nobody has used)
    virtual void hit(EntryId entry) = 0;     // requested while resident
    virtual void remove(EntryId entry) = 0;  // no longer resident
    // Requested and too large to be admitted: neither miss() nor insert() comes. Live caches refuse it instead.
    virtual void bypass(EntryId entry) { (void)entry; }
    virtual void tick(Clock clock) = 0;  // after each request, and at the end of each step
    // Appends evictable entries, in the order in which they should go, until their frames sum to at least
    // `frames` or none is left. Evicts nothing: whoever does calls remove() for each, and that is where ghosts
    // and counts belong; hands may move and marks may be cleared.
    // Returns how many went only because nothing met the policy's own condition (LFU-decay's threshold).
    virtual std::uint64_t select(const Candidates& candidates, std::uint64_t frames,
                                 std::vector<EntryId>& victims) = 0;

    std::uint32_t headroom_frames() const { return headroom_frames_; }
    // It has thrown, so decisions are missing: its cache cannot go on.
    bool failed() const { return failed_; }

protected:
    void set_failed() { failed_ = true; }

private:
    std::uint32_t headroom_frames_;
    bool failed_ = false;
};

using PolicyValue = std::variant<double, std::string>;
using PolicyOptions = std::map<std::string, PolicyValue, std::less<>>;

// Throws std::invalid_argument for an unknown name, an unknown option, or a value out of range.
std::unique_ptr<Policy> make_policy(std::string_view name, const PolicyOptions& options);
using PolicyFactory = std::unique_ptr<Policy> (*)(std::string_view name, const PolicyOptions& options);
std::vector<std::string> policy_names();

// Reads options one by one and refuses what was not asked for.
class OptionReader {
public:
    OptionReader(std::string_view policy, const PolicyOptions& options);
    bool has(std::string_view key) const;
    double number(std::string_view key, double otherwise);
    double number_in(std::string_view key, double otherwise, double least, double most);
    std::uint32_t whole_in(std::string_view key, std::uint32_t otherwise, std::uint32_t least,
                           std::uint32_t most);
    std::string text(std::string_view key, std::string_view otherwise);
    void finish() const;  // throws std::invalid_argument if an option was never read
    [[noreturn]] void refuse(std::string_view key, std::string_view expected) const;

private:
    std::string policy_;
    const PolicyOptions& options_;
    std::map<std::string, bool, std::less<>> seen_;
};

}  // namespace tierstore
