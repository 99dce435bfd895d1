// The simulated device: torch's PrivateUse1. Its memory is the host's and its kernels are the CPU's, run at once on
// the calling thread, so that values are exact and nothing depends on timing. What may be late on a real device is
// told to the checker: kernels, copies and frees belong to streams, and only events, tickets and waits order them.

#include "device.h"

#include <ATen/EmptyTensor.h>
#include <ATen/InferSize.h>
#include <ATen/TensorUtils.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <sys/mman.h>
#include <torch/library.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <tuple>

namespace simgpu {

Checker& checker() {
    static Checker* one = new Checker;  // outlives the threads that end with the process
    return *one;
}

Recorder& recorder() {
    static Recorder* one = new Recorder;
    return *one;
}

constexpr auto TYPE = c10::DeviceType::PrivateUse1;
const c10::DispatchKeySet KEYS(c10::DispatchKey::PrivateUse1);

thread_local int current_device_ = 0;
thread_local int64_t current_streams_[DEVICES] = {};
std::atomic<int64_t> streams_made{1};

int current_device() { return current_device_; }
void set_device(int device) { current_device_ = device; }
int64_t current_stream(int device) { return current_streams_[device]; }
int64_t new_stream() { return streams_made++; }

// Memory -----------------------------------------------------------------------------------------------------
//
// Freed blocks are kept, and given again on the stream that they were made for, at once, as by CUDA's caching
// allocator: work that another stream still does with one is then a race. A block whose use by other streams was
// recorded waits until the host has seen that use end. Fresh and freed memory is 0xff: NaN in floating point.

struct Block {
    size_t nbytes;
    int device;
    int64_t stream;
    std::vector<int64_t> users;
};

class Memory final : public c10::DeviceAllocator {
public:
    Memory() { std::fill(std::begin(total_), std::end(total_), size_t{8} << 30); }

    c10::DataPtr allocate(size_t asked) override {
        const int device = current_device_;
        const c10::Device where(TYPE, static_cast<c10::DeviceIndex>(device));
        if (asked == 0) return {nullptr, nullptr, &free_block, where};
        const size_t nbytes = (asked + 511) / 512 * 512;
        const int64_t stream = current_streams_[device];
        void* memory = reuse({nbytes, device, stream});
        if (memory == nullptr) memory = map(nbytes, device);
        std::lock_guard lock(mutex_);
        live_[memory] = {nbytes, device, stream, {}};
        live_bytes_[device] += nbytes;
        checker().count("memory.allocations");
        return {memory, memory, &free_block, where};
    }

    c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
    void copy_data(void* to, const void* from, size_t nbytes) const override { memcpy(to, from, nbytes); }
    bool initialized() override { return true; }
    void emptyCache(c10::MempoolId_t) override {}
    void resetAccumulatedStats(c10::DeviceIndex) override {}
    void resetPeakStats(c10::DeviceIndex) override {}
    c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override { return {}; }

    void recordStream(const c10::DataPtr& memory, c10::Stream stream) override {
        std::lock_guard lock(mutex_);
        if (auto found = live_.find(memory.get()); found != live_.end())
            found->second.users.push_back(stream.id());
    }

    std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
        std::lock_guard lock(mutex_);
        const size_t used = live_bytes_[device];
        return {total_[device] > used ? total_[device] - used : 0, total_[device]};
    }

    void set_total(int device, size_t nbytes) {
        std::lock_guard lock(mutex_);
        total_[device] = nbytes;
    }

    static void free_block(void* memory);

private:
    using Kind = std::tuple<size_t, int, int64_t>;
    struct Free {
        void* memory;
        Clock after;
    };

    void* reuse(const Kind& kind) {
        std::lock_guard lock(mutex_);
        std::vector<Free>& free = free_[kind];
        for (size_t i = free.size(); i-- > 0;) {
            if (!free[i].after.empty() && !checker().host_has_seen(free[i].after)) continue;
            void* memory = free[i].memory;
            free.erase(free.begin() + static_cast<std::ptrdiff_t>(i));
            return memory;
        }
        return nullptr;
    }

    void* map(size_t nbytes, int device) {
        std::lock_guard lock(mutex_);
        TORCH_CHECK_WITH(OutOfMemoryError, live_bytes_[device] + nbytes <= total_[device],
                         "simgpu: out of memory: ", nbytes, " bytes asked for, ", live_bytes_[device], " of ",
                         total_[device], " in use");
        void* memory = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        TORCH_CHECK_WITH(OutOfMemoryError, memory != MAP_FAILED, "simgpu: mmap of ", nbytes, " bytes failed");
        memset(memory, 0xff, nbytes);
        return memory;
    }

    std::mutex mutex_;
    std::unordered_map<void*, Block> live_;
    std::map<Kind, std::vector<Free>> free_;
    size_t live_bytes_[DEVICES] = {};
    size_t total_[DEVICES];
};

Memory& memory() {
    static Memory* one = new Memory;
    return *one;
}

void Memory::free_block(void* freed) {
    if (freed == nullptr) return;
    Memory& all = memory();
    std::lock_guard lock(all.mutex_);
    auto found = all.live_.find(freed);
    if (found == all.live_.end()) return;
    const Block block = std::move(found->second);
    all.live_.erase(found);
    all.live_bytes_[block.device] -= block.nbytes;
    memset(freed, 0xff, block.nbytes);
    Clock after;
    for (int64_t user : block.users) join(after, checker().launch(block.device, user, "free", {}));
    all.free_[{block.nbytes, block.device, block.stream}].push_back({freed, std::move(after)});
}

c10::Allocator* registered = [] {
    c10::SetAllocator(TYPE, &memory());
    return static_cast<c10::Allocator*>(&memory());
}();

void set_memory(int device, size_t nbytes) { memory().set_total(device, nbytes); }

// torch.empty(pin_memory=True). As with CUDA's allocator, copies that are under way when it is freed end with its content: it
// is not used again.
struct PinnedMemory final : c10::Allocator {
    c10::DataPtr allocate(size_t asked) override {
        const size_t nbytes = std::max<size_t>((asked + 4095) / 4096 * 4096, 4096);
        void* memory = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        TORCH_CHECK_WITH(OutOfMemoryError, memory != MAP_FAILED, "simgpu: mmap of ", nbytes, " bytes failed");
        checker().pin(reinterpret_cast<uintptr_t>(memory), nbytes);
        return {memory, memory, &free_block, c10::Device(c10::DeviceType::CPU)};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
    void copy_data(void* to, const void* from, size_t nbytes) const override { memcpy(to, from, nbytes); }
    static void free_block(void*) {}
};

// Streams and events -----------------------------------------------------------------------------------------

struct Event {
    Clock clock;
    Nodes after;
    std::chrono::steady_clock::time_point reached;
};

// The host waits for all that the stream has (all of the device's with stream -1).
void wait_for_stream(int device, int64_t stream) {
    checker().host_waits(device, stream);
    recorder().host_waits_for_streams(Checker::thread(), stream, now_ns());
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
    static constexpr c10::DeviceType static_type = TYPE;
    Guard() = default;
    explicit Guard(c10::DeviceType) {}

    static int index(c10::Device device) { return device.has_index() ? device.index() : current_device_; }
    static c10::Stream stream(int device, int64_t id) {
        return c10::Stream(c10::Stream::UNSAFE, c10::Device(TYPE, static_cast<c10::DeviceIndex>(device)), id);
    }

    c10::DeviceType type() const override { return TYPE; }
    c10::DeviceIndex deviceCount() const noexcept override { return DEVICES; }
    c10::Device getDevice() const override { return {TYPE, static_cast<c10::DeviceIndex>(current_device_)}; }
    void setDevice(c10::Device device) const override { current_device_ = index(device); }
    void uncheckedSetDevice(c10::Device device) const noexcept override { current_device_ = index(device); }
    c10::Device exchangeDevice(c10::Device device) const override {
        const c10::Device before = getDevice();
        current_device_ = index(device);
        return before;
    }

    c10::Stream getStream(c10::Device device) const override {
        return stream(index(device), current_streams_[index(device)]);
    }
    c10::Stream getDefaultStream(c10::Device device) const override { return stream(index(device), 0); }
    c10::Stream getNewStream(c10::Device device, int) const override {
        return stream(index(device), new_stream());
    }
    c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
        return stream(index(device), new_stream());
    }
    c10::Stream exchangeStream(c10::Stream next) const override {
        const c10::Stream before = stream(next.device_index(), current_streams_[next.device_index()]);
        current_streams_[next.device_index()] = next.id();
        return before;
    }
    void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
        memory().recordStream(data, stream);
    }

    void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
        delete static_cast<Event*>(event);
    }
    void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
        if (*event == nullptr) *event = new Event;
        static_cast<Event*>(*event)->clock =
            checker().launch(stream.device_index(), stream.id(), "record", {});
        static_cast<Event*>(*event)->after = recorder().reached(stream.id());
        static_cast<Event*>(*event)->reached = std::chrono::steady_clock::now();
        checker().count("event.record");
    }
    void block(void* event, const c10::Stream& stream) const override {
        checker().count("event.wait");
        if (event != nullptr) {
            checker().stream_waits(stream.device_index(), stream.id(), static_cast<Event*>(event)->clock);
            recorder().stream_waits(stream.id(), static_cast<Event*>(event)->after);
        }
    }
    // Everything queued is done, and whoever asks knows it then.
    bool queryEvent(void* event) const override {
        if (event != nullptr) checker().host_acquires(static_cast<Event*>(event)->clock);
        return true;
    }
    bool queryStream(const c10::Stream& stream) const override {
        checker().host_waits(stream.device_index(), stream.id());
        return true;
    }
    void synchronizeEvent(void* event) const override {
        checker().count("sync.event");
        if (event == nullptr) return;
        checker().host_acquires(static_cast<Event*>(event)->clock);
        recorder().host("sync", Checker::thread(), static_cast<Event*>(event)->after, now_ns());
    }
    void synchronizeStream(const c10::Stream& stream) const override {
        checker().count("sync.stream");
        wait_for_stream(stream.device_index(), stream.id());
    }
    void synchronizeDevice(c10::DeviceIndex device) const override {
        checker().count("sync.device");
        wait_for_stream(device < 0 ? current_device_ : device, -1);
    }
    // In milliseconds. All work is done when it is queued.
    double elapsedTime(void* from, void* to, c10::DeviceIndex) const override {
        const auto passed = static_cast<Event*>(to)->reached - static_cast<Event*>(from)->reached;
        return std::chrono::duration<double, std::milli>(passed).count();
    }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return true; }
    bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
    c10::DeviceIndex deviceCount() const override { return DEVICES; }
    void setCurrentDevice(c10::DeviceIndex device) const override { current_device_ = device; }
    c10::DeviceIndex getCurrentDevice() const override {
        return static_cast<c10::DeviceIndex>(current_device_);
    }
    c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
        return static_cast<c10::DeviceIndex>(std::exchange(current_device_, device));
    }
    c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
        return device < 0 ? getCurrentDevice() : exchangeDevice(device);
    }
    bool isPinnedPtr(const void* data) const override {
        return checker().is_pinned(reinterpret_cast<uintptr_t>(data));
    }
    c10::Allocator* getPinnedMemoryAllocator() const override {
        static PinnedMemory pinned;
        return &pinned;
    }
    at::Device getDeviceFromPtr(void*) const override { return {TYPE, 0}; }
};

void register_hooks() {
    static Hooks hooks;
    at::RegisterPrivateUse1HooksInterface(&hooks);
}

// Tensors ----------------------------------------------------------------------------------------------------

bool on_device(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == TYPE; }

Span span_of(const at::Tensor& tensor, Mode mode) {
    if (!tensor.numel()) return {0, 0, mode};
    int64_t last = 0;
    for (int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
    return {reinterpret_cast<uintptr_t>(tensor.const_data_ptr()),
            static_cast<size_t>(last + 1) * tensor.element_size(), mode};
}

at::Tensor as_cpu(const at::Tensor& tensor) {
    void* data = tensor.numel() ? const_cast<void*>(tensor.const_data_ptr()) : nullptr;
    return at::from_blob(data, tensor.sizes(), tensor.strides(),
                         at::TensorOptions().dtype(tensor.scalar_type()));
}

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool>,
                 std::optional<at::MemoryFormat> format) {
    c10::DeviceGuard guard(c10::device_or_default(device));
    return at::detail::empty_generic(size, &memory(), KEYS, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
    c10::DeviceGuard guard(c10::device_or_default(device));
    return at::detail::empty_strided_generic(size, stride, &memory(), KEYS, c10::dtype_or_default(dtype));
}

at::Tensor as_strided(const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride,
                      std::optional<int64_t> offset) {
    auto made = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(self.storage()),
                                                         self.key_set(), self.dtype());
    made.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset.value_or(self.storage_offset()));
    return made;
}

at::Tensor reshape_alias(const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride) {
    return as_strided(self, size, stride, self.storage_offset());
}

at::Tensor view(const at::Tensor& self, c10::IntArrayRef asked) {
    const auto size = at::infer_size_dv(asked, self.numel());
    const auto stride = at::detail::computeStride(self.sizes(), self.strides(), size);
    TORCH_CHECK(stride.has_value(), "view size is not compatible with input tensor's size and stride");
    return as_strided(self, size, *stride, self.storage_offset());
}

const at::Tensor& resize(const at::Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat>) {
    int64_t numel = 1;
    for (int64_t each : size) numel *= each;
    auto* storage = self.unsafeGetTensorImpl()->storage().unsafeGetStorageImpl();
    const size_t needed = static_cast<size_t>(numel + self.storage_offset()) * self.element_size();
    if (needed > storage->nbytes()) {
        c10::DeviceGuard guard(self.device());
        auto data = memory().allocate(needed);
        if (storage->nbytes()) memcpy(data.get(), storage->data(), storage->nbytes());
        storage->set_data_ptr_noswap(std::move(data));
        storage->set_nbytes(needed);
    }
    self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
    return self;
}

at::Tensor& set_source(at::Tensor& self, const at::Tensor& source) {
    return at::native::set_tensor_(self, source);
}

// `parameter.data = tensor` across devices, as CUDA has it.
bool may_take_data_of(const at::Tensor&, const at::Tensor&) { return true; }

void record_stream(at::Tensor& self, c10::Stream stream) {
    memory().recordStream(self.storage().data_ptr(), stream);
}

void used_by(const at::Tensor& tensor, int64_t stream) {
    memory().recordStream(tensor.storage().data_ptr(), Guard::stream(tensor.device().index(), stream));
}

// Copies -----------------------------------------------------------------------------------------------------
//
// As the CUDA runtime documents "API synchronization behavior": a copy from pageable memory has read it when the call
// returns, one to pageable memory is complete then; pinned memory is read and written in the order of the stream.

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool non_blocking) {
    const bool up = !on_device(self), down = !on_device(to);
    const int device = (up ? to : self).device().index();
    const int64_t stream = current_streams_[device];
    const std::string kind = up ? "h2d" : down ? "d2h" : "d2d";
    const int64_t begun = now_ns();
    Span read = span_of(self, Mode::READ), write = span_of(to, Mode::WRITE);
    bool blocks = (up || down) && !non_blocking;
    std::vector<Span> spans{read, write};
    if (up || down) {
        const Span& host = up ? read : write;
        if (host.nbytes && !checker().is_pinned(host.begin)) {
            checker().count(kind + ".pageable_bytes", static_cast<uint64_t>(self.nbytes()));
            // Other pageable memory comes and goes with the host's allocator, and is in no engine's hands.
            const bool known = checker().is_known(host.begin);
            if (up && known) checker().note_host("staging of h2d", {read});
            spans.erase(spans.begin() + (up ? 0 : 1));
            if (down && known) spans.push_back(write);
            blocks |= down;
        }
        checker().count(kind + (blocks ? ".blocking" : ".async"));
    } else {
        checker().count(kind);
    }
    checker().count(kind + ".bytes", static_cast<uint64_t>(self.nbytes()));
    checker().launch(device, stream, kind, spans);
    {
        at::AutoDispatchBelowADInplaceOrView below;
        as_cpu(to).copy_(as_cpu(self));
    }
    recorder().launch(kind, Checker::thread(), stream, 0, self.nbytes(), begun);
    if (blocks) wait_for_stream(device, stream);
    return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
    to.resize_(self.sizes());
    return copy_from(self, to, false);
}

at::Scalar item(const at::Tensor& self) {
    const int device = self.device().index();
    checker().launch(device, current_streams_[device], "item", {span_of(self, Mode::READ)});
    wait_for_stream(device, current_streams_[device]);
    checker().count("sync.item");
    at::AutoDispatchBelowADInplaceOrView below;
    return as_cpu(self).item();
}

// Kernels ----------------------------------------------------------------------------------------------------

// Operations whose result's size, or whose value, is the host's to know.
const std::set<std::string> WAITS = {
    "aten::nonzero",    "aten::bincount", "aten::masked_select", "aten::equal",
    "aten::is_nonzero", "aten::_unique2", "aten::unique_dim",    "aten::repeat_interleave.Tensor",
};

// Operations that take indices in host memory.
const std::set<std::string> INDEXING = {"aten::index.Tensor", "aten::_index_put_impl_", "aten::index_put_",
                                        "aten::index.Tensor_out"};

const std::set<std::string> PRODUCTS = {"aten::mm",        "aten::mm.out",  "aten::addmm",
                                        "aten::addmm.out", "aten::addmm_",  "aten::bmm",
                                        "aten::bmm.out",   "aten::baddbmm", "aten::baddbmm_"};

std::atomic<bool> widens_products{false};
void widen_products(bool widen) { widens_products = widen; }

// One call of an operation for which there is nothing but the CPU's kernel.
class Kernel {
public:
    Kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack)
        : op_(op), schema_(op.schema()), stack_(stack) {
        const auto& name = schema_.operator_name();
        name_ = name.name + (name.overload_name.empty() ? "" : "." + name.overload_name);
        widens_ = widens_products && PRODUCTS.count(name_);
    }

    void run() {
        const int64_t begun = now_ns();
        take_arguments();
        TORCH_CHECK(!(host_tensors_ && device_ >= 0) || INDEXING.count(name_), name_,
                    ": Expected all tensors to be on the same device, but found at least two devices, simgpu "
                    "and cpu!");
        if (device_ < 0) device_ = asked_ && asked_->has_index() ? asked_->index() : current_device_;
        stream_ = current_streams_[device_];
        std::vector<Span> spans;
        for (const Operand& each : operands_) {
            spans.push_back(span_of(each.given, Mode::READ));
            if (each.written) spans.push_back(span_of(each.given, Mode::WRITE));
        }
        checker().launch(device_, stream_, name_, spans);
        checker().count("kernels");
        checker().count("op." + name_);
        {
            at::AutoDispatchBelowADInplaceOrView below;
            op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack_);
        }
        return_results();
        recorder().launch(name_, Checker::thread(), stream_, operations(), nbytes_, begun);
        if (WAITS.count(name_) || masked_) {
            wait_for_stream(device_, stream_);
            checker().count("sync.op");
        }
    }

private:
    struct Operand {
        at::Tensor given, cpu;
        bool written;
        bool sized;    // written, and empty so far: the kernel gives it its size
        bool widened;  // the kernel has it in fp32
    };

    void take_arguments() {
        const auto& arguments = schema_.arguments();
        const size_t begin = stack_->size() - arguments.size();
        for (size_t i = 0; i < arguments.size(); ++i) {
            c10::IValue& value = (*stack_)[begin + i];
            const bool written = arguments[i].alias_info() && arguments[i].alias_info()->isWrite();
            if (value.isTensor()) {
                value = take(value.toTensor(), written);
            } else if (value.isTensorList()) {
                std::vector<at::Tensor> taken;
                for (const at::Tensor& each : value.toTensorVector()) taken.push_back(take(each, written));
                value = taken;
            } else if (value.isOptionalTensorList()) {
                c10::List<std::optional<at::Tensor>> taken;
                for (std::optional<at::Tensor> each : value.toOptionalTensorList()) {
                    masked_ |= each && each->defined() && each->scalar_type() == at::kBool;
                    taken.push_back(each ? std::optional(take(*each, written)) : std::nullopt);
                }
                value = taken;
            } else if (value.isDevice()) {
                asked_ = value.toDevice();
                value = at::Device(at::kCPU);
            }
        }
    }

    at::Tensor take(const at::Tensor& given, bool written) {
        if (!given.defined()) return given;
        if (!on_device(given)) {
            if (given.dim() > 0) {
                host_tensors_ = true;
                if (INDEXING.count(name_)) {
                    checker().count("h2d.blocking");
                    checker().count("h2d.bytes", static_cast<uint64_t>(given.nbytes()));
                    checker().count("h2d.pageable_bytes", static_cast<uint64_t>(given.nbytes()));
                }
            }
            return given;
        }
        TORCH_CHECK(device_ < 0 || device_ == given.device().index(), name_, ": tensors on two devices");
        device_ = given.device().index();
        nbytes_ += given.nbytes();
        for (Operand& each : operands_)
            if (each.given.is_same(given)) {
                each.written |= written;
                return each.cpu;
            }
        const bool sized = written && !given.numel();
        const auto options = at::TensorOptions().dtype(given.scalar_type());
        const bool widened = widens_ && given.scalar_type() == at::kBFloat16;
        at::Tensor cpu = sized ? at::empty({0}, options) : as_cpu(given);
        if (widened) cpu = cpu.to(at::kFloat);
        operands_.push_back({given, std::move(cpu), written, sized, widened});
        return operands_.back().cpu;
    }

    void return_results() {
        for (const Operand& each : operands_) {
            if (each.sized && each.cpu.numel()) each.given.resize_(each.cpu.sizes());
            if (each.written && (each.sized || each.widened)) fill(each.given, each.cpu);
        }
        const size_t count = schema_.returns().size(), begin = stack_->size() - count;
        for (size_t i = 0; i < count; ++i) {
            c10::IValue& value = (*stack_)[begin + i];
            if (value.isTensor()) {
                value = give(value.toTensor());
            } else if (value.isTensorList()) {
                std::vector<at::Tensor> given;
                for (const at::Tensor& each : value.toTensorVector()) given.push_back(give(each));
                value = given;
            }
        }
    }

    at::Tensor give(const at::Tensor& result) {
        if (!result.defined()) return result;
        for (const Operand& each : operands_)
            if (each.cpu.is_same(result)) return each.given;
        if (result.numel()) {  // a view of an operand
            const auto address = reinterpret_cast<uintptr_t>(result.const_data_ptr());
            for (const Operand& each : operands_) {
                if (!each.given.numel()) continue;
                const auto begin = reinterpret_cast<uintptr_t>(each.given.storage().data());
                if (address < begin || address >= begin + each.given.storage().nbytes()) continue;
                return as_strided(each.given, result.sizes(), result.strides(),
                                  static_cast<int64_t>((address - begin) / each.given.element_size()));
            }
        }
        const bool narrow =
            std::any_of(operands_.begin(), operands_.end(), [](const Operand& each) { return each.widened; });
        c10::DeviceGuard guard(c10::Device(TYPE, static_cast<c10::DeviceIndex>(device_)));
        at::Tensor made = at::detail::empty_strided_generic(result.sizes(), result.strides(), &memory(), KEYS,
                                                            narrow ? at::kBFloat16 : result.scalar_type());
        fill(made, result);
        return made;
    }

    // Floating point operations of a product: with the first two matrices among its operands.
    double operations() const {
        if (!PRODUCTS.count(name_)) return 0;
        std::vector<at::Tensor> matrices;
        for (const Operand& each : operands_)
            if (each.given.dim() >= 2 && !each.written) matrices.push_back(each.given);
        const size_t first = matrices.size() > 2 ? matrices.size() - 2 : 0;  // what products are added to
        if (matrices.size() == 1) matrices.push_back(matrices[0]);
        return 2.0 * static_cast<double>(matrices[first].numel()) *
               static_cast<double>(matrices[first + 1].size(-1));
    }

    void fill(const at::Tensor& to, const at::Tensor& from) {
        if (!from.numel()) return;
        nbytes_ += to.nbytes();
        at::AutoDispatchBelowADInplaceOrView below;
        as_cpu(to).copy_(from);
        checker().note(device_, stream_, name_, {span_of(to, Mode::WRITE)});
    }

    const c10::OperatorHandle& op_;
    const c10::FunctionSchema& schema_;
    torch::jit::Stack* stack_;
    std::string name_;
    std::vector<Operand> operands_;
    std::optional<at::Device> asked_;
    int device_ = -1;
    int64_t stream_ = 0;
    size_t nbytes_ = 0;
    bool widens_ = false, host_tensors_ = false, masked_ = false;
};

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) { Kernel(op, stack).run(); }

}  // namespace simgpu

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
    m.impl("empty.memory_format", simgpu::empty);
    m.impl("empty_strided", simgpu::empty_strided);
    m.impl("as_strided", simgpu::as_strided);
    m.impl("_reshape_alias", simgpu::reshape_alias);
    m.impl("view", simgpu::view);
    m.impl("resize_", simgpu::resize);
    m.impl("set_.source_Tensor", simgpu::set_source);
    m.impl("_has_compatible_shallow_copy_type", simgpu::may_take_data_of);
    m.impl("record_stream", simgpu::record_stream);
    m.impl("_copy_from", simgpu::copy_from);
    m.impl("_copy_from_and_resize", simgpu::copy_from_and_resize);
    m.impl("_local_scalar_dense", simgpu::item);
    // torch composes it of others on devices that it does not know, with other bits than the CPU's kernel.
    m.impl("silu_backward", torch::CppFunction::makeFromBoxedFunction<&simgpu::fallback>());
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
    m.fallback(torch::CppFunction::makeFromBoxedFunction<&simgpu::fallback>());
}
