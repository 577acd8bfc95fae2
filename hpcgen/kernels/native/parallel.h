// Threads and scratch memory. OpenMP, so that the threads are those torch uses and the two never compete for cores.
#pragma once

#include <omp.h>
#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>

namespace hpcgen {

// body(i) for each i < count, handed out one at a time in rising order. The team always has `threads` members:
// libgomp ends and restarts threads when its size changes.
template <class Body>
void parallel_for(int threads, int64_t count, const Body& body) {
  if (threads <= 1 || count <= 1) {
    for (int64_t i = 0; i < count; ++i) body(i);
    return;
  }
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
  for (int64_t i = 0; i < count; ++i) body(i);
}

// Memory that is kept between calls and only grows. Not initialised.
class Scratch {
 public:
  ~Scratch() { std::free(data_); }

  template <class T>
  T* get(size_t count) {
    const size_t bytes = count * sizeof(T);
    if (bytes > capacity_) grow(bytes);
    return static_cast<T*>(data_);
  }

 private:
  void grow(size_t bytes) {
    constexpr size_t huge_page = size_t{2} << 20;
    const size_t alignment = bytes < huge_page ? 4096 : huge_page;
    std::free(data_);
    capacity_ = (bytes + bytes / 4 + alignment - 1) / alignment * alignment;
    data_ = std::aligned_alloc(alignment, capacity_);
    if (data_ == nullptr) {
      capacity_ = 0;
      throw std::bad_alloc();
    }
    if (alignment == huge_page) madvise(data_, capacity_, MADV_HUGEPAGE);
  }

  void* data_ = nullptr;
  size_t capacity_ = 0;
};

}  // namespace hpcgen
