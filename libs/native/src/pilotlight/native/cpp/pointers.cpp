// Writes an archive's parameters anew for a process whose memory lies elsewhere: see pointers.h. Nothing of the driver is asked here, and what
// comes out is checked as any archive before anything of it reaches the driver.
#include "pointers.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "archive.h"
#include "driver.h"

namespace pilotlight {

namespace {

constexpr std::uint64_t UNIT = 16, MOST_BYTES = std::uint64_t(1) << 57;

using Ranges = std::vector<std::pair<std::uint64_t, std::uint64_t>>;

struct Table {
    PointersHeader header{};
    const AllocationEntry *allocations = nullptr;
    const std::uint64_t *captures = nullptr;
    const WordEntry *words = nullptr;
};

// `count` entries from `start` on, where the machine can read them; null where they do not lie in the archive.
template <class Entry>
const Entry *entries(const char *bytes, std::uint64_t size, std::uint64_t start, std::uint64_t count) {
    if (start % alignof(Entry) || start > size || count > (size - start) / sizeof(Entry)) return nullptr;
    return reinterpret_cast<const Entry *>(bytes + start);
}

// Where the parameters of all nodes lie, in order; none touches the next.
Ranges parameters_of(const char *bytes, const Header &header) {
    Ranges found, joined;
    auto *graphs = reinterpret_cast<const GraphEntry *>(bytes + header.graphs);
    for (std::uint32_t graph = 0; graph < header.num_graphs; graph++) {
        auto *nodes = reinterpret_cast<const NodeEntry *>(bytes + graphs[graph].nodes);
        for (std::uint32_t node = 0; node < graphs[graph].num_nodes; node++) {
            std::uint64_t start = graphs[graph].parameters + nodes[node].params;
            if (nodes[node].param_bytes) found.emplace_back(start, start + nodes[node].param_bytes);
        }
    }
    std::sort(found.begin(), found.end());
    for (auto [start, stop] : found) {
        if (!joined.empty() && start < joined.back().second)
            joined.back().second = std::max(joined.back().second, stop);
        else
            joined.emplace_back(start, stop);
    }
    return joined;
}

int check_words(const Table &table, const Ranges &parameters) {
    auto range = parameters.begin();
    std::uint64_t before = 0;
    for (std::uint64_t number = 0; number < table.header.num_words; number++) {
        const WordEntry &word = table.words[number];
        if (word.place % sizeof(std::uint64_t) || word.place < before) return fail(MISUSED, "words of addresses are not in order");
        before = word.place + sizeof(std::uint64_t);
        while (range != parameters.end() && range->second < before) ++range;
        if (range == parameters.end() || word.place < range->first) return fail(MISUSED, "an address lies in no node's parameters");
        if (word.allocation >= table.header.num_allocations || word.inside > table.allocations[word.allocation].bytes)
            return fail(MISUSED, "an address lies in no allocation");
    }
    return OK;
}

int open_table(const char *bytes, std::uint64_t size, Table *table) {
    if (int failed = check_archive(bytes, size)) return failed;
    Header header;
    std::memcpy(&header, bytes, sizeof header);
    if (!header.pointers) return fail(MISUSED, "the archive does not say which of its parameters are addresses");
    auto *found = entries<PointersHeader>(bytes, size, header.pointers * UNIT, 1);
    if (!found || std::memcmp(found->magic, POINTERS_MAGIC, sizeof POINTERS_MAGIC))
        return fail(MISUSED, "the table of an archive's addresses lies outside of it, or is of another version");
    table->header = *found;
    table->allocations = entries<AllocationEntry>(bytes, size, found->allocations, found->num_allocations);
    table->captures = entries<std::uint64_t>(bytes, size, found->captures, found->num_captures);
    table->words = entries<WordEntry>(bytes, size, found->words, found->num_words);
    if (!table->allocations || !table->captures || !table->words) return fail(MISUSED, "a table of addresses lies outside of its archive");
    for (std::uint32_t number = 0; number < found->num_allocations; number++) {
        const AllocationEntry &one = table->allocations[number];
        if (one.bytes > MOST_BYTES || one.address > MOST_BYTES) return fail(MISUSED, "an allocation lies nowhere");
        if (one.contents && !entries<char>(bytes, size, one.contents, one.bytes))
            return fail(MISUSED, "an allocation's contents lie outside of the archive");
    }
    return check_words(*table, parameters_of(bytes, header));
}

}  // namespace

}  // namespace pilotlight

using namespace pilotlight;

// Whether an archive says of which words of its parameters what they point to, and all of that holds together.
PILOTLIGHT_EXPORT int pilotlight_pointers_check(const char *bytes, std::uint64_t size) {
    Table table;
    return open_table(bytes, size, &table);
}

// Writes the archive to `moved`, which is as long, for an arena at `arena_address`: with the addresses of allocations that begin at `bases`.
PILOTLIGHT_EXPORT int pilotlight_pointers_move(const char *bytes, std::uint64_t size, const std::uint64_t *bases, std::uint32_t count,
                                               std::uint64_t arena_address, std::uint64_t arena_bytes, char *moved) {
    Table table;
    if (int failed = open_table(bytes, size, &table)) return failed;
    if (count != table.header.num_allocations)
        return fail(MISUSED, std::to_string(count) + " allocations were made, and " + std::to_string(table.header.num_allocations) + " recorded");
    for (std::uint32_t number = 0; number < count; number++) {
        std::uint64_t from = bases[number] - arena_address, length = table.allocations[number].bytes;
        // 0: it was not made, and no word may need it.
        if (bases[number] && (bases[number] < arena_address || length > arena_bytes || from > arena_bytes - length))
            return fail(MISUSED, "allocation " + std::to_string(number) + " lies outside of the arena");
    }
    std::memcpy(moved, bytes, size);
    Header header;
    std::memcpy(&header, moved, sizeof header);
    header.arena_address = arena_address;
    header.arena_bytes = arena_bytes;
    std::memcpy(moved, &header, sizeof header);
    for (std::uint64_t number = 0; number < table.header.num_words; number++) {
        const WordEntry &word = table.words[number];
        if (!bases[word.allocation]) return fail(MISUSED, "allocation " + std::to_string(word.allocation) + " was not made");
        std::uint64_t address = bases[word.allocation] + word.inside;
        std::memcpy(moved + word.place, &address, sizeof address);
    }
    // Parameters may lie where another table does, in what somebody made up.
    return check_archive(moved, size);
}
