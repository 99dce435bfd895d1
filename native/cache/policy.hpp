// The interface of cache policies: a policy sees the requests of one cache and names victims. The live cache and a
// replay run the same objects, so a policy must be deterministic: no clock of its own, no unordered iteration.
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
inline constexpr std::uint32_t kGroupStride = 4;  // in the live cache, entry = record * kGroupStride + group

enum class Clock : std::uint8_t { REQUEST, STEP };

// The part of the program that an access belongs to.
enum class Phase : std::uint8_t { INIT, FORWARD, BACKWARD, OPTIMIZER, USER, EXPORT };

// What is known of an entry beforehand. Entries of one record are requested by the same accesses, or some of them.
struct EntryInfo {
    std::uint32_t record;
    std::uint32_t group;  // which of the record's entries it is
    std::uint32_t layer;
    std::uint32_t frames;  // its size; 0 if it never becomes resident
};

// One atomic access as it begins, with all entries that it will request.
struct AccessInfo {
    Phase phase;
    std::uint32_t layer;
    std::span<const EntryId> entries;
    std::span<const std::uint8_t>
        requesters;  // for each entry, the sequences whose last token requests it, a bit each; empty: unknown
};

// What a policy may know of entries when it chooses: their size, and whether they are evictable.
struct Candidates {
    const std::uint32_t* frames;  // size of each entry, in frames
    const std::uint32_t* busy;    // non-zero: pinned or on hold, never a victim

    bool evictable(EntryId entry) const { return busy[entry] == 0; }
};

class Policy {
public:
    // headroom_frames: frames of the capacity that the policy leaves empty.
    explicit Policy(std::uint32_t headroom_frames = 0) : headroom_frames_(headroom_frames) {}
    Policy(const Policy&) = delete;
    Policy& operator=(const Policy&) = delete;
    virtual ~Policy() = default;

    // Called first, once: the frames that this policy's entries may occupy (excluding its headroom).
    virtual void set_capacity(std::uint64_t frames) { (void)frames; }
    // Called before any other call about the entry: it may be requested.
    virtual void add(EntryId entry, const EntryInfo& info) { (void)entry, (void)info; }
    // Only for a policy that needs the program's schedule: each access as it begins (with layer scope, every layer's
    // policy receives all accesses).
    virtual bool follows_accesses() const { return false; }
    virtual void access(const AccessInfo& info) { (void)info; }

    // Requested and not resident: room is made next, then insert() follows (for a prefetch, when it is requested, or
    // never). A policy with ghosts looks for the ghost here, before its victims become ghosts themselves.
    virtual void miss(EntryId entry) { (void)entry; }
    virtual void insert(EntryId entry) = 0;  // became resident (by a request, or an unused prefetch)
    virtual void hit(EntryId entry) = 0;     // requested while resident
    virtual void remove(EntryId entry) = 0;  // no longer resident
    // Requested, but too large to be admitted: neither miss() nor insert() follows. Live caches refuse it instead.
    virtual void bypass(EntryId entry) { (void)entry; }
    virtual void tick(Clock clock) = 0;  // after each request, and at the end of each step
    // Appends evictable entries, in order of eviction, until their frames sum to at least `frames` or none is left.
    // Does not evict: the caller calls remove() for each, and ghosts and counts must be updated there; hands may move
    // and marks may be cleared. Returns how many were chosen only because no entry met the policy's own condition
    // (LFU-decay's threshold).
    virtual std::uint64_t select(const Candidates& candidates, std::uint64_t frames,
                                 std::vector<EntryId>& victims) = 0;

    std::uint32_t headroom_frames() const { return headroom_frames_; }
    // The policy has thrown, so decisions are missing: its cache cannot be used any more.
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

// Reads options one by one and refuses unknown ones.
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
