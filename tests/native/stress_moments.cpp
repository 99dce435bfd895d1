// Several threads step records with narrow moments on one engine, in spans of every shape and in several parts, each
// against the scalar kernel on plain memory. Usage: stress_moments [rounds]
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "native/engine/engine.hpp"
#include "tests/native/check.hpp"

using namespace tierstore;
using namespace std::chrono_literals;

namespace {

using Random = std::mt19937;
using Bytes = std::vector<std::byte>;

size_t pick(Random& random, size_t n) { return std::uniform_int_distribution<size_t>(0, n - 1)(random); }

constexpr size_t kMostPieces = 5;

// A section in pieces of an arena of its own, in random order, and the same bytes in one piece.
struct Section {
    Section(Random& random, size_t numel, size_t unit) : plain(numel * unit) {
        std::vector<size_t> cuts{0, numel};
        for (size_t n = pick(random, kMostPieces); n > 0; --n) cuts.push_back(pick(random, numel + 1));
        std::sort(cuts.begin(), cuts.end());
        std::vector<size_t> order(cuts.size() - 1);
        for (size_t i = 0; i < order.size(); ++i) order[i] = i;
        std::shuffle(order.begin(), order.end(), random);
        std::vector<Buffer::Extent> extents(order.size());
        size_t at = 0;
        for (size_t i : order) {
            extents[i] = {at, (cuts[i + 1] - cuts[i]) * unit};
            at += extents[i].capacity;
        }
        auto arena = std::make_shared<Arena>((plain.size() / 4096 + 1) * 4096, HugePages::Off);
        buffer = std::make_unique<Buffer>(std::move(arena), extents, plain.size());
        std::memset(plain.data(), 0, plain.size());
    }

    void fill(Random& random) {
        std::normal_distribution<float> normal;
        auto* x = reinterpret_cast<float*>(plain.data());
        for (size_t i = 0; i < plain.size() / sizeof(float); ++i) x[i] = normal(random);
        buffer->scatter(plain.data());
    }
    template <class T>
    T* as() {
        return reinterpret_cast<T*>(plain.data());
    }
    void check() const {
        Bytes got(plain.size());
        buffer->gather(got.data());
        CHECK(got == plain);
    }

    Bytes plain;
    std::unique_ptr<Buffer> buffer;
};

void submitter(Engine& engine, unsigned seed, unsigned rounds) {
    Random random(seed);
    for (unsigned round = 0; round < rounds; ++round) {
        const MomentFormat format = pick(random, 2) == 0 ? MomentFormat::Bf16 : MomentFormat::Int8;
        const bool int8 = format == MomentFormat::Int8;
        const size_t numel = pick(random, 4) == 0 ? 300'000 + pick(random, 300'000) : 1 + pick(random, 3000);
        Section weight(random, numel, 4), grad(random, numel, 4);
        Section exp_avg(random, numel, int8 ? 1 : 2), exp_avg_sq(random, numel, int8 ? 1 : 2);
        Section scale(random, moment_blocks(numel), 4), scale_sq(random, moment_blocks(numel), 4);
        weight.fill(random);
        grad.fill(random);
        for (Section* section : {&exp_avg, &exp_avg_sq, &scale, &scale_sq})
            section->buffer->scatter(section->plain.data());
        // Of the gradient, which is the same in all steps: its blocks of 4,096 elements, added in order.
        double square = 0;
        for (size_t at = 0; at < numel; at += 4096)
            square += sum_of_squares(grad.as<const float>() + at, std::min<size_t>(4096, numel - at));
        const auto squares = std::make_shared<DoubleTable>(2);
        bool summed = false;
        std::vector<Ticket> after;
        uint64_t number = 0;
        for (size_t n = 1 + pick(random, 3); n > 0; --n) {
            std::vector<AdamWStep> steps(1 + pick(random, 3),
                                         {1e-3f, 0.9f, 0.999f, 1e-8f, 0.01f, 0.5f, 0.5f});
            number += steps.size();
            const bool given = pick(random, 3) != 0;
            AdamWRecord record{
                {*weight.buffer}, *exp_avg.buffer, *exp_avg_sq.buffer, {}, {}, format, seed, number};
            if (int8) record.scales = {*scale.buffer, *scale_sq.buffer};
            if (given) {
                record.grad = {*grad.buffer};
                record.squares = squares;
                record.squares_index = 1;
                summed = true;
            }
            after = {engine.compute(adamw_work(std::move(record), steps, 0.5f, engine.compute_threads()),
                                    {after})};
            AdamWSpan span{};
            span.weight = weight.as<float>();
            span.moments = {format, exp_avg.plain.data(), exp_avg_sq.plain.data(), scale.as<float>(),
                            scale_sq.as<float>()};
            span.grad = given ? grad.as<const float>() : nullptr;
            span.numel = numel;
            adamw_with(InstructionSet::Scalar, span, steps, 0.5f, {seed, number, 0});
        }
        CHECK(engine.wait(after.front(), 1h));
        CHECK(squares->load(1) == (summed ? square : 0.0));
        for (Section* section : {&weight, &grad, &exp_avg, &exp_avg_sq}) section->check();
        if (int8) {
            scale.check();
            scale_sq.check();
        }
    }
}

}  // namespace

int main(int argc, char** argv) {
    const auto rounds = static_cast<unsigned>(argc > 1 ? std::atoi(argv[1]) : 20);
    EngineOptions options;
    options.backend = IoBackend::Threads;
    options.compute_threads = 3;
    Engine engine(options);
    std::vector<std::thread> threads;
    for (unsigned i = 0; i < 3; ++i) threads.emplace_back([&, i] { submitter(engine, 1 + i, rounds); });
    for (auto& thread : threads) thread.join();
    engine.close();
    std::puts("1 passed, 0 failed");
}
