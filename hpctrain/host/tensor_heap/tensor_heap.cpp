/* Heap from which torch allocates the tensors of a CPU.
 *
 * It has one range of addresses, from which nothing but tensors is allocated. Freed memory is joined with its free
 * neighbours at once, is kept for later tensors, and is given to the tensor that it fits best. malloc keeps tensors
 * and small objects side by side instead, so that a small object between two freed tensors keeps their memory apart,
 * and it returns large tensors to the system, which must clear every page when it is used again.
 *
 * A run compiles this file for the version of torch that it uses. */

#include <c10/core/CPUAllocator.h>

#include <cerrno>
#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <sys/mman.h>
#include <unistd.h>
#include <unordered_map>
#include <utility>

namespace {

constexpr size_t ALIGNMENT = 64;                  // bytes, as torch aligns tensors
constexpr size_t SMALLEST_TENSOR = 64 << 10;      // bytes of the smallest tensor that is allocated here
constexpr size_t GROWTH = 64 << 20;               // bytes that are made usable at a time

constexpr size_t round_up(size_t size, size_t unit) { return (size + unit - 1) / unit * unit; }

class TensorHeap final : public c10::Allocator {
public:
    /* Reserve a range of addresses, which takes no memory. `torch_allocator` has the small tensors. */
    TensorHeap(char *begin, size_t size, c10::Allocator *torch_allocator)
        : begin_(begin), end_(begin + size), used_end_(begin), usable_end_(begin), torch_(torch_allocator) {}

    c10::DataPtr allocate(size_t size) override;

    c10::DeleterFnPtr raw_deleter() const override { return &TensorHeap::free_tensor; }

    void copy_data(void *destination, const void *source, size_t count) const override {
        default_copy_data(destination, source, count);
    }

    /* Return the pages of free memory to the system. The addresses remain in use. */
    void release_free_pages();

private:
    using Address = char *;

    static void free_tensor(void *data);

    Address take(size_t size);
    Address take_free(size_t size);
    Address take_new(size_t size);
    void give_back(Address address);
    void add_free(Address address, size_t size);
    void remove_free(std::map<Address, size_t>::iterator block);

    const Address begin_, end_;
    Address used_end_, usable_end_; // ends of what tensors have used, and of what can be read and written
    c10::Allocator *const torch_;
    std::mutex mutex_;
    std::unordered_map<Address, size_t> tensors_;
    std::map<Address, size_t> free_;                   // blocks of free memory, no two of them adjacent
    std::set<std::pair<size_t, Address>> free_by_size_; // the same blocks
};

TensorHeap *installed_heap = nullptr; // never deleted, since tensors may be freed while the process ends

c10::DataPtr TensorHeap::allocate(size_t size) {
    if (size < SMALLEST_TENSOR) return torch_->allocate(size);
    Address address = take(round_up(size, ALIGNMENT));
    if (address == nullptr) return torch_->allocate(size); // it raises torch's error if there is no memory
    c10::profiledCPUMemoryReporter().New(address, size);
    return {address, address, &TensorHeap::free_tensor, c10::Device(c10::DeviceType::CPU)};
}

void TensorHeap::free_tensor(void *data) {
    TensorHeap &heap = *installed_heap;
    Address address = static_cast<Address>(data);
    if (address < heap.begin_ || address >= heap.end_) {
        heap.torch_->raw_deallocate(data);
        return;
    }
    c10::profiledCPUMemoryReporter().Delete(data);
    heap.give_back(address);
}

TensorHeap::Address TensorHeap::take(size_t size) {
    std::lock_guard<std::mutex> lock(mutex_);
    Address address = take_free(size);
    if (address == nullptr) address = take_new(size);
    if (address != nullptr) tensors_.emplace(address, size);
    return address;
}

/* Take the smallest free block that is large enough. */
TensorHeap::Address TensorHeap::take_free(size_t size) {
    auto smallest = free_by_size_.lower_bound({size, nullptr});
    if (smallest == free_by_size_.end()) return nullptr;
    auto [free_size, address] = *smallest;
    remove_free(free_.find(address));
    if (free_size > size) add_free(address + size, free_size - size);
    return address;
}

/* Take new memory, and before it what is free at the end of the used memory. */
TensorHeap::Address TensorHeap::take_new(size_t size) {
    Address address = used_end_;
    auto last = free_.empty() ? free_.end() : std::prev(free_.end());
    bool last_is_free = last != free_.end() && last->first + last->second == used_end_;
    if (last_is_free) address = last->first;
    if (size > static_cast<size_t>(end_ - address)) return nullptr;
    if (address + size > usable_end_) {
        size_t growth = round_up(address + size - usable_end_, GROWTH);
        if (growth > static_cast<size_t>(end_ - usable_end_)) growth = end_ - usable_end_;
        if (mprotect(usable_end_, growth, PROT_READ | PROT_WRITE) != 0) return nullptr;
        usable_end_ += growth;
    }
    if (last_is_free) remove_free(last);
    used_end_ = address + size;
    return address;
}

void TensorHeap::give_back(Address address) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto tensor = tensors_.find(address);
    size_t size = tensor->second;
    tensors_.erase(tensor);
    auto next = free_.lower_bound(address);
    if (next != free_.end() && next->first == address + size) {
        size += next->second;
        remove_free(next);
    }
    auto after = free_.lower_bound(address);
    if (after != free_.begin()) {
        auto previous = std::prev(after);
        if (previous->first + previous->second == address) {
            address = previous->first;
            size += previous->second;
            remove_free(previous);
        }
    }
    add_free(address, size);
}

void TensorHeap::add_free(Address address, size_t size) {
    free_.emplace(address, size);
    free_by_size_.emplace(size, address);
}

void TensorHeap::remove_free(std::map<Address, size_t>::iterator block) {
    free_by_size_.erase({block->second, block->first});
    free_.erase(block);
}

void TensorHeap::release_free_pages() {
    std::lock_guard<std::mutex> lock(mutex_);
    const uintptr_t page = sysconf(_SC_PAGESIZE);
    for (auto [address, size] : free_) {
        uintptr_t first = round_up(reinterpret_cast<uintptr_t>(address), page);
        uintptr_t last = (reinterpret_cast<uintptr_t>(address) + size) / page * page;
        if (first < last) madvise(reinterpret_cast<void *>(first), last - first, MADV_DONTNEED);
    }
}

} // namespace

extern "C" {

/* Allocate the tensors of this process from a new heap of at most `size` bytes.
 *
 * Return 0, or the number of the error if the system does not reserve so many addresses. */
int hpctrain_install_tensor_heap(size_t size) {
    if (installed_heap != nullptr) return 0;
    size = round_up(size, GROWTH);
    void *begin = mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (begin == MAP_FAILED) return errno;
    installed_heap = new TensorHeap(static_cast<char *>(begin), size, c10::GetCPUAllocator());
    c10::SetCPUAllocator(installed_heap);
    return 0;
}

/* Return the free memory of the heap to the system. */
void hpctrain_release_tensor_heap(void) {
    if (installed_heap != nullptr) installed_heap->release_free_pages();
}

/* Allocate and free memory as torch does for a tensor. */
void *hpctrain_allocate_tensor(size_t size) { return c10::GetCPUAllocator()->raw_allocate(size); }
void hpctrain_free_tensor(void *data) { c10::GetCPUAllocator()->raw_deallocate(data); }
}
