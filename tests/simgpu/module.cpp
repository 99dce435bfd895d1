// The Python module `_simgpu`: the checker, and collectives that behave as NCCL's.

#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "device.h"

namespace simgpu {

// As NCCL: takes tensors of the device alone, runs on a stream of its own behind the present one, and `wait` puts the
// present stream behind it instead of blocking. Gloo moves the bytes.
class Work final : public c10d::Work {
public:
    Work(std::vector<c10::intrusive_ptr<c10d::Work>> inner, std::vector<at::Tensor> tensors, Clock done,
         Nodes recorded, int device, int64_t stream)
        : inner_(std::move(inner)),
          tensors_(std::move(tensors)),
          done_(std::move(done)),
          recorded_(std::move(recorded)),
          device_(device),
          stream_(stream) {}

    // NCCL's watchdog holds the tensors of a work that is never waited for until it is done.
    ~Work() override {
        for (const at::Tensor& each : tensors_) used_by(each, stream_);
    }
    bool isCompleted() override { return inner_.empty() || inner_.back()->isCompleted(); }
    bool isSuccess() const override { return true; }
    bool wait(std::chrono::milliseconds) override {
        for (auto& each : inner_) each->wait();
        checker().count("collective.wait");
        checker().stream_waits(device_, current_stream(device_), done_);
        recorder().stream_waits(current_stream(device_), recorded_);
        tensors_.clear();
        return true;
    }
    void synchronize() override { wait(std::chrono::milliseconds(0)); }

    // What is coalesced is one work.
    void add(Work& other) {
        inner_.insert(inner_.end(), other.inner_.begin(), other.inner_.end());
        tensors_.insert(tensors_.end(), other.tensors_.begin(), other.tensors_.end());
        join(done_, other.done_);
        recorded_.insert(recorded_.end(), other.recorded_.begin(), other.recorded_.end());
    }

private:
    std::vector<c10::intrusive_ptr<c10d::Work>> inner_;
    std::vector<at::Tensor> tensors_;
    Clock done_;
    Nodes recorded_;
    int device_;
    int64_t stream_;
};

class Collectives final : public c10d::Backend {
public:
    Collectives(c10::intrusive_ptr<c10d::Backend> gloo, int rank, int size)
        : Backend(rank, size), gloo_(std::move(gloo)), stream_(new_stream()) {}

    const std::string getBackendName() const override { return "simccl"; }
    bool supportsCoalescing() const override { return true; }
    void startCoalescing() override { coalescing_ = true; }
    c10::intrusive_ptr<c10d::Work> endCoalescing() override {
        coalescing_ = false;
        if (batch_.empty()) return nullptr;
        auto all = batch_.front();
        for (size_t i = 1; i < batch_.size(); ++i) all->add(*batch_[i]);
        batch_.clear();
        return all;
    }
    void abort() override { gloo_->abort(); }
    void shutdown() override { gloo_->shutdown(); }

    c10::intrusive_ptr<c10d::Work> alltoall_base(at::Tensor& out, at::Tensor& in,
                                                 std::vector<int64_t>& out_splits,
                                                 std::vector<int64_t>& in_splits,
                                                 const c10d::AllToAllOptions& options) override {
        return issue("alltoall", {in}, {out}, [&](auto& reads, auto& writes) {
            return gloo_->alltoall_base(writes[0], reads[0], out_splits, in_splits, options);
        });
    }
    c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& out, at::Tensor& in,
                                                   const c10d::AllgatherOptions& options) override {
        return issue("allgather", {in}, {out}, [&](auto& reads, auto& writes) {
            at::Tensor own = reads[0].clone();  // it may be a part of `out`
            return gloo_->_allgather_base(writes[0], own, options);
        });
    }
    c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                             const c10d::AllreduceOptions& options) override {
        return issue("allreduce", tensors, tensors,
                     [&](auto&, auto& writes) { return gloo_->allreduce(writes, options); });
    }
    c10::intrusive_ptr<c10d::Work> send(std::vector<at::Tensor>& tensors, int rank, int tag) override {
        return issue("send", tensors, {},
                     [&](auto& reads, auto&) { return gloo_->send(reads, rank, tag + TAGS); });
    }
    c10::intrusive_ptr<c10d::Work> recv(std::vector<at::Tensor>& tensors, int rank, int tag) override {
        return issue("recv", {}, tensors,
                     [&](auto&, auto& writes) { return gloo_->recv(writes, rank, tag + TAGS); });
    }

private:
    // Apart from those of Gloo's own messages between the same ranks.
    static constexpr int TAGS = 1000;

    template <class Call>
    c10::intrusive_ptr<c10d::Work> issue(const std::string& what, std::vector<at::Tensor> reads,
                                         std::vector<at::Tensor> writes, Call call) {
        std::vector<Span> spans;
        std::vector<at::Tensor> tensors, host_reads, host_writes;
        int device = current_device();
        const auto take = [&](const at::Tensor& tensor, Mode mode, std::vector<at::Tensor>& host) {
            TORCH_CHECK(on_device(tensor), "simccl: ", what, " of a tensor on ", tensor.device());
            TORCH_CHECK(tensor.is_contiguous(), "simccl: ", what, " of a tensor that is not contiguous");
            device = tensor.device().index();
            spans.push_back(span_of(tensor, mode));
            host.push_back(as_cpu(tensor));
            tensors.push_back(tensor);
        };
        for (const at::Tensor& each : reads) take(each, Mode::READ, host_reads);
        for (const at::Tensor& each : writes) take(each, Mode::WRITE, host_writes);
        checker().stream_waits(device, stream_,
                               checker().launch(device, current_stream(device), "record", {}));
        Clock done = checker().launch(device, stream_, what, spans);
        size_t nbytes = 0;
        for (const at::Tensor& each : reads.empty() ? writes : reads) nbytes += each.nbytes();
        recorder().stream_waits(stream_, recorder().reached(current_stream(device)));
        Nodes recorded =
            recorder().launch("collective " + what, Checker::thread(), stream_, 0, nbytes, now_ns());
        checker().count("collective." + what);
        std::vector<c10::intrusive_ptr<c10d::Work>> inner{call(host_reads, host_writes)};
        auto work = c10::make_intrusive<Work>(std::move(inner), std::move(tensors), std::move(done),
                                              std::move(recorded), device, stream_);
        if (coalescing_) batch_.push_back(work);
        return work;
    }

    c10::intrusive_ptr<c10d::Backend> gloo_;
    int64_t stream_;
    bool coalescing_ = false;
    std::vector<c10::intrusive_ptr<Work>> batch_;
};

// (address, bytes, written) as Python has them.
std::vector<Span> spans_of(const std::vector<std::tuple<uintptr_t, size_t, bool>>& given) {
    std::vector<Span> spans;
    for (auto [begin, nbytes, written] : given)
        spans.push_back({begin, nbytes, written ? Mode::WRITE : Mode::READ});
    return spans;
}

}  // namespace simgpu

PYBIND11_MODULE(_simgpu, m) {
    using namespace simgpu;
    py::module_::import("torch.distributed");
    py::class_<Collectives, c10d::Backend, c10::intrusive_ptr<Collectives>>(m, "Collectives")
        .def(py::init([](c10::intrusive_ptr<c10d::Backend> gloo, int rank, int size) {
            return c10::make_intrusive<Collectives>(std::move(gloo), rank, size);
        }));
    m.attr("DEVICES") = DEVICES;
    m.def("register_hooks", register_hooks);
    m.def("current_device", current_device);
    m.def("set_device", set_device);
    m.def("set_memory", set_memory);
    m.def("widen_products", widen_products);

    m.def("violations", [] { return checker().violations(); });
    m.def("counts", [] { return checker().counts(); });
    m.def("reset", [] { checker().reset(); });

    m.def("enter_thread", [](const std::string& name) { checker().enter_thread(name); });
    m.def("release", [] { return checker().host_releases(); });
    m.def("acquire", [](const Clock& clock) { checker().host_acquires(clock); });

    m.def("pin", [](uintptr_t begin, size_t nbytes) { return checker().pin(begin, nbytes); });
    m.def("unpin", [](uintptr_t begin) { return checker().unpin(begin); });
    m.def("forget", [](uintptr_t begin, size_t nbytes) { checker().forget(begin, nbytes); });
    m.def("note_host",
          [](const std::string& what, const std::vector<std::tuple<uintptr_t, size_t, bool>>& spans) {
              checker().note_host(what, spans_of(spans));
          });

    m.def("issue",
          [](int engine, int64_t ticket, const std::vector<int64_t>& after, bool external,
             const std::string& what, const std::vector<std::tuple<uintptr_t, size_t, bool>>& spans) {
              checker().issue(engine, ticket, after, external, what, spans_of(spans));
          });
    m.def("complete", [](int engine, int64_t ticket) { checker().complete(engine, ticket); });
    m.def("host_knows",
          [](int engine, const std::vector<int64_t>& tickets) { checker().host_knows(engine, tickets); });
    m.def("record", [] { recorder().start(); });
    m.def("recording", [] { return recorder().on(); });
    m.def("recorded", [] {
        py::list found;
        for (const Node& each : recorder().stop())
            found.append(py::make_tuple(each.what, each.thread, each.stream, each.ticket, each.operations,
                                        each.nbytes, each.after, each.begin_ns, each.end_ns));
        return found;
    });
    m.def("now_ns", now_ns);
    m.def("record_mark",
          [](const std::string& what) { recorder().host(what, Checker::thread(), {}, now_ns()); });
    m.def("record_ticket", [](const std::string& what, int engine, int64_t ticket,
                              const std::vector<int64_t>& after, uint64_t nbytes, int64_t begin_ns) {
        recorder().issue(what, Checker::thread(), engine, ticket, after, nbytes, begin_ns);
    });
    m.def("record_completion",
          [](int engine, int64_t ticket) { recorder().complete(Checker::thread(), engine, ticket); });
    m.def("record_wait", [](int engine, const std::vector<int64_t>& tickets, int64_t begin_ns) {
        recorder().host_waits_for_tickets(Checker::thread(), engine, tickets, begin_ns);
    });
    m.def("record_following",
          [](int engine, const std::vector<int64_t>& tickets) { recorder().follow(engine, tickets); });

    m.def("close_engine", [](int engine) { checker().close_engine(engine); });
}
