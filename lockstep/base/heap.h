#pragma once

#include <cstddef>
#include <optional>
#include <string>

namespace lockstep {

/// Lets malloc keep what is freed in this process for the next that asks, in place of handing it
/// back to the kernel. A training step frees its activations and gradients and asks for them
/// again. With glibc's defaults each step then pays for new pages: they took a fourth of a step of
/// the model `wide`. What this process has allocated at most, it holds from then on.
///
/// Blocks of over 32 MiB still come and go with the kernel. False, with nothing done, where
/// malloc is not glibc's or the user has chosen (see heap_chosen). Thread-safe.
bool keep_freed_memory();

/// Lets malloc's main heap grow by `bytes` at once, with huge pages, and keep so much of what is
/// freed. For a program that is about to allocate it in small blocks: loading LibTorch takes 42 MB.
/// What is not used takes no memory, beyond the last huge page. Call it before other threads
/// allocate. False where malloc is not glibc's, the user has chosen, or the heap cannot grow.
bool grow_heap_in_huge_pages(size_t bytes);

/// The variable by which the user has chosen how malloc keeps memory: MALLOC_TRIM_THRESHOLD_,
/// MALLOC_MMAP_THRESHOLD_, MALLOC_MMAP_MAX_, MALLOC_TOP_PAD_, or GLIBC_TUNABLES with
/// glibc.malloc. None: no choice.
std::optional<std::string> heap_chosen();

}  // namespace lockstep
