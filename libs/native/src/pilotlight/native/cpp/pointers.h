// Which words of an archive's parameters are addresses, and of what: MEDUSA's indirect index pointers, beside the parameters as they were.
//
//     [ archive )[ header )[ allocations )[ captures: tags, in order )[ words )[ contents of permanent allocations )
//
// The archive's header says where the table is; who restores parameters as they are needs nothing of it.
#pragma once

#include <cstdint>

namespace pilotlight {

constexpr char POINTERS_MAGIC[8] = {'P', 'L', 'P', 'O', 'I', 'N', 'T', '1'};

struct PointersHeader {
    char magic[8];
    std::uint32_t num_allocations, num_captures;
    std::uint64_t num_words, allocations, captures, words;
};

struct AllocationEntry {
    std::uint64_t address, bytes;
    std::uint64_t contents;  // a place in the archive; 0: they are not kept
    std::uint32_t taken;     // within which capture, from 1 on; 0: before all
    std::uint32_t given;     // behind which; ~0: never
    std::uint32_t kind, reserved;
};
static_assert(sizeof(AllocationEntry) == 40, "as it is written");

struct WordEntry {
    std::uint64_t place;   // of the word, in the archive
    std::uint64_t inside;  // bytes from the allocation's beginning
    std::uint32_t allocation, reserved;
};
static_assert(sizeof(WordEntry) == 24, "as it is written");

}  // namespace pilotlight
