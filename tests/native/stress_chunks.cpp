// Requests cut into chunks, against a kernel that transfers as little as it likes, interrupts, puts off and
// refuses, in any order: every byte must arrive exactly once, and direct transfers must keep their alignment.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "native/base/align.hpp"
#include "native/io/request_queue.hpp"
#include "tests/native/check.hpp"

using namespace tierstore;

namespace {

using Random = std::mt19937;
using Bytes = std::vector<unsigned char>;

size_t pick(Random& random, size_t from, size_t to) {
    return std::uniform_int_distribution<size_t>(from, to)(random);
}

constexpr size_t kFileBytes = 1 << 17;
constexpr size_t kAlignment = 512;

struct FakeKernel {
    Bytes image = Bytes(kFileBytes);
    std::vector<int> touched = std::vector<int>(kFileBytes);
    bool refuses_direct = false;

    ssize_t transfer(Random& random, const Chunk& chunk, const OpenFile& file) {
        const size_t dice = pick(random, 0, 9);
        if (dice == 0) return -EINTR;
        if (dice == 1) return -EAGAIN;
        size_t total = 0;
        for (const iovec& part : chunk.vector()) total += part.iov_len;
        CHECK(total > 0);
        const bool direct = chunk.fd() == file.direct_fd;
        if (direct) {
            if (refuses_direct) return -EINVAL;
            CHECK(is_aligned(chunk.offset(), kAlignment));
            for (const iovec& part : chunk.vector()) {
                CHECK(is_aligned(part.iov_base, kAlignment));
                CHECK(is_aligned(part.iov_len, kAlignment));
            }
        }
        size_t n = dice < 5 ? pick(random, 1, total) : total;
        if (direct && dice < 4) n = std::max<size_t>(kAlignment, round_down(n, kAlignment));
        size_t at = chunk.offset();
        size_t left = n;
        for (const iovec& part : chunk.vector()) {
            const size_t here = std::min(left, part.iov_len);
            CHECK(at + here <= kFileBytes);
            if (chunk.kind() == IoKind::Read) {
                std::memcpy(part.iov_base, image.data() + at, here);
            } else {
                std::memcpy(image.data() + at, part.iov_base, here);
            }
            for (size_t i = 0; i < here; ++i) ++touched[at + i];
            at += here;
            left -= here;
        }
        return static_cast<ssize_t>(n);
    }
};

std::shared_ptr<OpenFile> fake_file() {
    char path[] = "/tmp/tierstore-chunks-XXXXXX";
    const int fd = mkstemp(path);
    CHECK(fd >= 0);
    ::close(fd);
    auto file =
        std::make_shared<OpenFile>(path, FileCreate::No, DirectIo::Off, FileAccess::ReadWrite, nullptr);
    ::unlink(path);
    file->direct_fd = ::dup(file->buffered_fd);
    file->memory_alignment = file->offset_alignment = kAlignment;
    return file;
}

struct Pending {
    IoKind kind;
    size_t offset;
    std::vector<iovec> parts;
    bool complete = false;
};

void run_round(Random& random) {
    FakeKernel kernel;
    kernel.refuses_direct = pick(random, 0, 4) == 0;
    for (auto& byte : kernel.image) byte = static_cast<unsigned char>(random());
    const auto file = fake_file();
    std::unique_ptr<unsigned char, void (*)(void*)> memory(
        static_cast<unsigned char*>(std::aligned_alloc(4096, 2 * kFileBytes)), std::free);
    for (size_t i = 0; i < 2 * kFileBytes; ++i) memory.get()[i] = static_cast<unsigned char>(random());
    Bytes expected_image = kernel.image;
    Bytes expected_memory(memory.get(), memory.get() + 2 * kFileBytes);
    std::vector<int> expected_touched(kFileBytes);

    RequestQueue queue(4096 * pick(random, 1, 4));
    std::vector<std::unique_ptr<Pending>> requests;
    size_t offset = 0, place = 0;
    // Requests over disjoint stretches of the file and of memory, in pieces of any alignment.
    for (uint64_t id = 1; id <= 6; ++id) {
        auto pending = std::make_unique<Pending>();
        pending->kind = pick(random, 0, 1) ? IoKind::Read : IoKind::Write;
        offset += pick(random, 0, 2) ? 0 : pick(random, 0, 700);
        pending->offset = offset;
        IoRequest request;
        for (size_t pieces = pick(random, 1, 12); pieces > 0; --pieces) {
            const size_t n = pick(random, 0, 3) ? kAlignment * pick(random, 1, 4) : pick(random, 1, 1500);
            if (pick(random, 0, 3) == 0) place += pick(random, 1, 600);
            if (pick(random, 0, 2)) place = round_up(place, kAlignment);
            request.parts.push_back({memory.get() + place, n});
            auto* const in_memory = expected_memory.data() + place;
            auto* const in_file = expected_image.data() + offset + request.nbytes;
            CHECK(place + n <= 2 * kFileBytes);
            if (pending->kind == IoKind::Read) {
                std::memcpy(in_memory, in_file, n);
            } else {
                std::memcpy(in_file, in_memory, n);
            }
            for (size_t i = 0; i < n; ++i) expected_touched[offset + request.nbytes + i] = 1;
            request.nbytes += n;
            place += n;
        }
        offset += request.nbytes;
        CHECK(offset <= kFileBytes);
        request.id = id;
        request.kind = pending->kind;
        request.priority = static_cast<Priority>(pick(random, 0, 2));
        request.file = file;
        request.offset = pending->offset;
        request.complete = [p = pending.get()](const IoResult& result) {
            CHECK(!result.failure);
            CHECK(!p->complete);
            p->complete = true;
        };
        queue.push(std::move(request));
        requests.push_back(std::move(pending));
    }

    std::vector<std::unique_ptr<Chunk>> in_flight;
    while (queue.active() > 0) {
        while (in_flight.size() < 5) {
            auto chunk = queue.next();
            if (!chunk) break;
            in_flight.push_back(std::move(chunk));
        }
        if (pick(random, 0, 5) == 0) queue.promote(pick(random, 1, 6));
        auto& chunk = in_flight[pick(random, 0, in_flight.size() - 1)];
        chunk->prepare();
        const Progress progress = chunk->advance(kernel.transfer(random, *chunk, *file));
        if (progress == Progress::Again) continue;
        CHECK(progress == Progress::Done);
        if (const auto finished = queue.retire(*chunk)) finished->request.complete(result(*finished));
        std::swap(chunk, in_flight.back());
        in_flight.pop_back();
    }
    CHECK(in_flight.empty());
    CHECK(!queue.next());
    for (const auto& pending : requests) CHECK(pending->complete);
    CHECK(kernel.image == expected_image);
    CHECK(std::memcmp(memory.get(), expected_memory.data(), expected_memory.size()) == 0);
    CHECK(kernel.touched == expected_touched);
}

// A failure ends its request once, after its chunks in flight, and leaves the others alone.
void run_failures(Random& random) {
    const auto file = fake_file();
    Bytes memory(1 << 16);
    RequestQueue queue(4096);
    int completed = 0, failed = 0;
    for (uint64_t id = 1; id <= 3; ++id) {
        IoRequest request;
        request.id = id;
        request.kind = IoKind::Read;
        request.file = file;
        request.parts = {{memory.data(), memory.size()}};
        request.nbytes = memory.size();
        request.complete = [&completed, &failed](const IoResult& result) {
            ++completed;
            failed += result.failure ? 1 : 0;
        };
        queue.push(std::move(request));
    }
    CHECK(queue.cancel(3));
    CHECK(!queue.cancel(3));
    const size_t bad = pick(random, 0, 40);
    std::vector<std::unique_ptr<Chunk>> in_flight;
    for (size_t step = 0; queue.active() > 0; ++step) {
        while (in_flight.size() < 4) {
            auto chunk = queue.next();
            if (!chunk) break;
            in_flight.push_back(std::move(chunk));
        }
        CHECK(!queue.cancel(1));
        auto& chunk = in_flight[pick(random, 0, in_flight.size() - 1)];
        chunk->prepare();
        size_t asked = 0;
        for (const iovec& part : chunk->vector()) asked += part.iov_len;
        const bool fails = step == bad;
        const Progress progress = chunk->advance(fails ? (pick(random, 0, 1) ? 0 : -EIO) : ssize_t(asked));
        CHECK((progress == Progress::Failed) == fails);
        if (progress == Progress::Again) continue;
        if (const auto finished = queue.retire(*chunk)) finished->request.complete(result(*finished));
        std::swap(chunk, in_flight.back());
        in_flight.pop_back();
    }
    CHECK(completed == 2);
    CHECK(failed <= 1);
}

}  // namespace

int main() {
    Random random(20240917);
    for (int i = 0; i < 100; ++i) run_round(random);
    for (int i = 0; i < 100; ++i) run_failures(random);
    std::puts("2 passed, 0 failed");
}
