/* Heap from which torch allocates the tensors of a CPU.
 *
 * The heap reserves one range of addresses, which contains nothing but tensors. A tensor gets the smallest free block
 * that is large enough. A freed block is merged with its free neighbours at once, and kept for later tensors.
 *
 * malloc places tensors and small objects side by side. A small object between two freed tensors prevents it from
 * merging them. It also returns large blocks to the system, which then has to clear their pages for the next tensor.
 *
 * A run compiles this file with the headers of the torch that it uses. */

#include <c10/core/CPUAllocator.h>

#include <cerrno>
#include <cstdint>
#include <map>
#include <mutex>
#include <new>
#include <pthread.h>
#include <set>
#include <sys/mman.h>
#include <unistd.h>
#include <utility>

#define EXPORTED extern "C" __attribute__((visibility("default")))

namespace {

constexpr size_t ALIGNMENT = 64;            // bytes, as torch aligns tensors
constexpr size_t SMALLEST_SIZE = 64 << 10;  // bytes; torch's own allocator allocates smaller tensors
constexpr size_t GROWTH = 8 << 20;          // bytes by which the usable part of the range grows

constexpr size_t round_up(size_t size, size_t unit) { return (size + unit - 1) / unit * unit; }

class TensorHeap final : public c10::Allocator {
public:
    /* The range begins at `begin` and is not accessible yet. `torch_allocator` is torch's own allocator. */
    TensorHeap(char *begin, size_t size, c10::Allocator *torch_allocator)
        : begin_(begin), end_(begin + size), used_end_(begin), usable_end_(begin), torch_allocator_(torch_allocator) {}

    c10::DataPtr allocate(size_t size) override;

    c10::DeleterFnPtr raw_deleter() const override { return &TensorHeap::free_tensor; }

    void copy_data(void *destination, const void *source, size_t count) const override {
        default_copy_data(destination, source, count);
    }

    /* Return the pages of free blocks to the system. The next tensor there gets new pages. */
    void release_free_pages();

    void lock() { mutex_.lock(); }
    void unlock() { mutex_.unlock(); }

private:
    using Address = char *;
    using SizeIndex = std::set<std::pair<size_t, Address>>;

    /* Part of the range. While a tensor uses the block, it keeps the node that its size needs in `free_blocks_` when
     * the tensor is freed. So freeing a tensor allocates nothing, and cannot fail. */
    struct Block {
        size_t size;
        SizeIndex::node_type index_node;
        bool is_free() const { return index_node.empty(); }
    };
    using Blocks = std::map<Address, Block>;

    static void free_tensor(void *data);
    static SizeIndex::node_type new_index_node(size_t size, Address address);

    Address allocate_block(size_t size);
    Address reuse_free_block(size_t size);
    Address extend_used_range(size_t size);
    void free_block(Address address);

    const Address begin_, end_;
    Address used_end_;   // end of the last block
    Address usable_end_; // end of the part of the range that is readable and writable
    c10::Allocator *const torch_allocator_;
    std::mutex mutex_;
    Blocks blocks_; // all blocks by address, without spaces between them; no two neighbours are free
    SizeIndex free_blocks_;
};

TensorHeap *installed_heap = nullptr; // never deleted, since tensors may be freed while the process ends

c10::DataPtr TensorHeap::allocate(size_t size) {
    if (size < SMALLEST_SIZE || size > static_cast<size_t>(end_ - begin_)) return torch_allocator_->allocate(size);
    Address address = allocate_block(round_up(size, ALIGNMENT));
    // Torch's allocator raises torch's error if there is no memory either.
    if (address == nullptr) return torch_allocator_->allocate(size);
    c10::profiledCPUMemoryReporter().New(address, size);
    return {address, address, &TensorHeap::free_tensor, c10::Device(c10::DeviceType::CPU)};
}

void TensorHeap::free_tensor(void *data) {
    TensorHeap &heap = *installed_heap;
    Address address = static_cast<Address>(data);
    if (address < heap.begin_ || address >= heap.end_) {
        heap.torch_allocator_->raw_deallocate(data);
        return;
    }
    c10::profiledCPUMemoryReporter().Delete(data);
    heap.free_block(address);
}

TensorHeap::SizeIndex::node_type TensorHeap::new_index_node(size_t size, Address address) {
    SizeIndex index;
    return index.extract(index.emplace(size, address).first);
}

TensorHeap::Address TensorHeap::allocate_block(size_t size) {
    std::lock_guard<std::mutex> guard(mutex_);
    Address address = reuse_free_block(size);
    return address != nullptr ? address : extend_used_range(size);
}

/* Return the smallest free block that is large enough, and split the rest off; nullptr if there is none. */
TensorHeap::Address TensorHeap::reuse_free_block(size_t size) {
    auto best_fit = free_blocks_.lower_bound({size, nullptr});
    if (best_fit == free_blocks_.end()) return nullptr;
    auto [free_size, address] = *best_fit;
    auto block = blocks_.find(address);
    if (free_size > size) {
        auto rest_node = new_index_node(free_size - size, address + size);
        blocks_.emplace_hint(std::next(block), address + size, Block{free_size - size, {}});
        free_blocks_.insert(std::move(rest_node));
    }
    block->second.size = size;
    block->second.index_node = free_blocks_.extract(best_fit);
    return address;
}

/* Return a block at the end of the used range, which includes the last block if that is free.
 *
 * Return nullptr if the range or the memory is exhausted. */
TensorHeap::Address TensorHeap::extend_used_range(size_t size) {
    auto last = blocks_.empty() ? blocks_.end() : std::prev(blocks_.end());
    bool extends_last = last != blocks_.end() && last->second.is_free();
    Address address = extends_last ? last->first : used_end_;
    if (size > static_cast<size_t>(end_ - address)) return nullptr;
    if (address + size > usable_end_) {
        size_t growth = round_up(address + size - usable_end_, GROWTH);
        if (growth > static_cast<size_t>(end_ - usable_end_)) growth = end_ - usable_end_;
        if (mprotect(usable_end_, growth, PROT_READ | PROT_WRITE) != 0) return nullptr;
        usable_end_ += growth;
    }
    if (extends_last) {
        last->second.index_node = free_blocks_.extract({last->second.size, address});
        last->second.size = size;
    } else {
        blocks_.emplace_hint(blocks_.end(), address, Block{size, new_index_node(size, address)});
    }
    used_end_ = address + size;
    return address;
}

/* Mark a block as free, and merge it with its free neighbours. */
void TensorHeap::free_block(Address address) {
    std::lock_guard<std::mutex> guard(mutex_);
    auto block = blocks_.find(address);
    if (block == blocks_.end() || block->second.is_free()) return;
    SizeIndex::node_type node = std::move(block->second.index_node);
    size_t size = block->second.size;
    auto next = std::next(block);
    if (next != blocks_.end() && next->second.is_free()) {
        free_blocks_.erase({next->second.size, next->first});
        size += next->second.size;
        blocks_.erase(next);
    }
    if (block != blocks_.begin() && std::prev(block)->second.is_free()) {
        auto previous = std::prev(block);
        free_blocks_.erase({previous->second.size, previous->first});
        size += previous->second.size;
        blocks_.erase(block);
        block = previous;
    }
    block->second.size = size;
    block->second.index_node = {};
    node.value() = {size, block->first};
    free_blocks_.insert(std::move(node));
}

void TensorHeap::release_free_pages() {
    std::lock_guard<std::mutex> guard(mutex_);
    const uintptr_t page = sysconf(_SC_PAGESIZE);
    for (auto [size, address] : free_blocks_) {
        uintptr_t first = round_up(reinterpret_cast<uintptr_t>(address), page);
        uintptr_t last = (reinterpret_cast<uintptr_t>(address) + size) / page * page;
        if (first < last) madvise(reinterpret_cast<void *>(first), last - first, MADV_DONTNEED);
    }
}

void lock_heap() { installed_heap->lock(); }
void unlock_heap() { installed_heap->unlock(); }

} // namespace

/* Allocate the tensors of this process from a heap of at most `size` bytes, from now on.
 *
 * Return 0, also if the process has a heap already, or the number of the error if the system does not reserve so many
 * addresses. */
EXPORTED int hpctrain_install_tensor_heap(size_t size) {
    if (installed_heap != nullptr) return 0;
    if (size == 0) return ENOMEM;
    size = round_up(size, GROWTH);
    void *begin = mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (begin == MAP_FAILED) return errno;
    auto *heap = new (std::nothrow) TensorHeap(static_cast<char *>(begin), size, c10::GetCPUAllocator());
    if (heap == nullptr) {
        munmap(begin, size);
        return ENOMEM;
    }
    installed_heap = heap;
    // Fork while no other thread uses the heap, since the child process would find it locked for ever.
    pthread_atfork(lock_heap, unlock_heap, unlock_heap);
    c10::SetCPUAllocator(heap);
    return 0;
}

/* Return the free memory of the heap to the system. */
EXPORTED void hpctrain_release_tensor_heap(void) {
    if (installed_heap != nullptr) installed_heap->release_free_pages();
}

/* Allocate and free memory as torch does for a tensor. */
EXPORTED void *hpctrain_allocate_tensor(size_t size) { return c10::GetCPUAllocator()->raw_allocate(size); }
EXPORTED void hpctrain_free_tensor(void *data) { c10::GetCPUAllocator()->raw_deallocate(data); }
