#include "native/bindings/python_policy.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <string>
#include <vector>

#include "native/bindings/bindings.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace tierstore;

namespace {

// What select() may ask about entries, valid only while it runs.
class CandidatesView {
public:
    CandidatesView(const Candidates& candidates, std::size_t entries)
        : candidates_(&candidates), entries_(entries) {}
    void expire() { candidates_ = nullptr; }
    bool evictable(EntryId entry) const { return check(entry).evictable(entry); }
    std::uint32_t frames(EntryId entry) const { return check(entry).frames[entry]; }

private:
    const Candidates& check(EntryId entry) const {
        if (candidates_ == nullptr) throw std::invalid_argument("candidates are only valid inside select()");
        if (entry >= entries_) throw std::invalid_argument("no entry " + std::to_string(entry));
        return *candidates_;
    }

    const Candidates* candidates_;
    std::size_t entries_;
};

// Calls an object. Whatever it raises passes through the core as it is, with a note that names the class; the
// policy has failed then, and refuses to go on.
class PythonPolicy final : public Policy {
public:
    PythonPolicy(std::string name, nb::object object)
        : name_(std::move(name)), object_(std::move(object)), follows_(has("access")), misses_(has("miss")) {}
    ~PythonPolicy() override {
        const nb::gil_scoped_acquire gil;
        object_.reset();
    }

    bool follows_accesses() const override { return follows_; }
    void set_capacity(std::uint64_t frames) override {
        const nb::gil_scoped_acquire gil;
        if (has("set_capacity")) call("set_capacity", frames);
    }
    void add(EntryId entry, const EntryInfo& info) override {
        const nb::gil_scoped_acquire gil;
        if (entry >= resident_.size()) resident_.resize(entry + 1, 0);
        if (has("add")) call("add", entry, info.record, info.layer, info.frames);
    }
    void access(const AccessInfo& info) override {
        const nb::gil_scoped_acquire gil;
        nb::list entries;
        for (const EntryId entry : info.entries) entries.append(entry);
        call("access", static_cast<std::uint32_t>(info.phase), info.layer, entries);
    }
    void miss(EntryId entry) override {
        if (!misses_) return;
        const nb::gil_scoped_acquire gil;
        call("miss", entry);
    }
    void insert(EntryId entry) override {
        const nb::gil_scoped_acquire gil;
        resident_[entry] = 1;
        call("insert", entry);
    }
    void hit(EntryId entry) override {
        const nb::gil_scoped_acquire gil;
        call("hit", entry);
    }
    void remove(EntryId entry) override {
        const nb::gil_scoped_acquire gil;
        resident_[entry] = 0;
        call("remove", entry);
    }
    void tick(Clock clock) override {
        const nb::gil_scoped_acquire gil;
        call("tick", clock);
    }
    std::uint64_t select(const Candidates& candidates, std::uint64_t frames,
                         std::vector<EntryId>& victims) override {
        const nb::gil_scoped_acquire gil;
        auto* view = new CandidatesView(candidates, resident_.size());
        const nb::object lent = nb::cast(view, nb::rv_policy::take_ownership);
        const nb::object named = call("select", frames, lent);
        const std::uint64_t freed = take(named, candidates, frames, victims);
        view->expire();
        if (freed < frames) check_none_left(candidates, freed, frames);
        return 0;
    }

private:
    bool has(const char* method) const { return nb::hasattr(object_, method); }

    template <typename... Args>
    nb::object call(const char* method, Args&&... args) {
        if (failed()) refuse("it has failed before, and cannot go on");
        try {
            return object_.attr(method)(std::forward<Args>(args)...);
        } catch (nb::python_error& error) {
            set_failed();
            error.value().attr("add_note")("in cache policy " + name_ + ", " + method + "()");
            throw;
        }
    }

    // Its contract is broken. RuntimeError: what the user's own code raises keeps its type.
    [[noreturn]] void refuse(const std::string& what) {
        set_failed();
        PyErr_SetString(PyExc_RuntimeError, ("cache policy " + name_ + ": " + what).c_str());
        throw nb::python_error();
    }

    std::uint64_t take(const nb::object& named, const Candidates& candidates, std::uint64_t frames,
                       std::vector<EntryId>& victims) {
        std::uint64_t freed = 0;
        try {
            for (const nb::handle item : named) {
                if (freed >= frames) break;
                const auto entry = nb::cast<EntryId>(item);
                const bool can_go =
                    entry < resident_.size() && resident_[entry] == 1 && candidates.evictable(entry);
                if (!can_go) refuse("select() named entry " + std::to_string(entry) + ", which cannot go");
                resident_[entry] = 2;  // until remove() comes: named once
                victims.push_back(entry);
                freed += candidates.frames[entry];
            }
        } catch (const nb::cast_error&) {
            refuse("select() must name entries by their numbers");
        } catch (nb::python_error& error) {
            if (!failed()) error.value().attr("add_note")("in cache policy " + name_ + ", select()");
            set_failed();
            throw;
        }
        return freed;
    }

    void check_none_left(const Candidates& candidates, std::uint64_t freed, std::uint64_t frames) {
        for (EntryId entry = 0; entry < resident_.size(); ++entry) {
            if (resident_[entry] != 1 || !candidates.evictable(entry)) continue;
            refuse("select() named " + std::to_string(freed) + " of " + std::to_string(frames) +
                   " frames, and entry " + std::to_string(entry) + " could go as well");
        }
    }

    std::string name_;
    nb::object object_;
    bool follows_;
    bool misses_;
    std::vector<std::uint8_t> resident_;  // 1; 2 once it is named as a victim
};

std::unique_ptr<Policy> make_python_policy(const std::string& name, const PolicyOptions& options) {
    const std::size_t colon = name.find(':');
    nb::dict keywords;
    for (const auto& [key, value] : options) {
        if (const double* number = std::get_if<double>(&value)) {
            keywords[key.c_str()] = *number;
        } else {
            keywords[key.c_str()] = std::get<std::string>(value);
        }
    }
    nb::object type;
    try {
        type = nb::module_::import_(name.substr(0, colon).c_str()).attr(name.substr(colon + 1).c_str());
    } catch (nb::python_error& error) {
        if (!error.matches(PyExc_ImportError) && !error.matches(PyExc_AttributeError)) throw;
        throw std::invalid_argument("cache policy '" + name + "': " + nb::str(error.value()).c_str());
    }
    nb::object object;
    try {
        object = type(**keywords);
    } catch (nb::python_error& error) {
        error.value().attr("add_note")("in cache policy " + name);
        throw;
    }
    for (const char* method : {"insert", "hit", "remove", "tick", "select"}) {
        if (nb::hasattr(object, method)) continue;
        throw std::invalid_argument("cache policy " + name + " has no method '" + method +
                                    "'; it needs insert, hit, remove, tick and select");
    }
    return std::make_unique<PythonPolicy>(name, std::move(object));
}

}  // namespace

std::unique_ptr<Policy> make_any_policy(std::string_view name, const PolicyOptions& options) {
    if (name.find(':') == std::string_view::npos) return make_policy(name, options);
    return make_python_policy(std::string(name), options);
}

void bind_python_policy(nb::module_& m) {
    nb::enum_<Clock>(m, "Clock").value("REQUEST", Clock::REQUEST).value("STEP", Clock::STEP);
    nb::class_<CandidatesView>(
        m, "Candidates",
        "What a policy may know of entries while it chooses; ValueError once select() has returned.")
        .def("evictable", &CandidatesView::evictable, "entry"_a)
        .def("frames", &CandidatesView::frames, "entry"_a);
}
