// Smaller kernel images: a library's module holds a thousand kernels of which a graph uses one, and loading takes time by their bytes.
//
// Code, constants and notes of kernels that are not used are left out, with their symbols; what numbers sections or symbols is renumbered.
// The driver follows such numbers without looking: an image of which a part names what is left out is not pruned.
#include <algorithm>
#include <map>

#include "driver.h"
#include "elf64.h"
#include "images.h"

namespace pilotlight {

namespace {

const char *const OF_A_KERNEL[] = {".text.", ".nv.info.", ".nv.shared.", ".nv.local."};
const char CONSTANTS[] = ".nv.constant";  // the bank's number follows, and the kernel's name where it is one's own
// Nobody debugs here. The section stays, empty: NVIDIA's tools look for the notes of younger compilers at fixed places behind it.
const char FRAMES[] = ".debug_frame";
// Kinds of sections of which every number is known. Others, such as those of compute capability 10 (.nv.merc), may number what moves.
constexpr std::uint32_t KNOWN_TYPES[] = {0, 1, SYMBOLS, 3, RELA, 7, NO_BITS, REL, NV_INFO, NV_CALLGRAPH, 0x7000000b, 0x70000086};
// Notes of the module that begin with the number of a kernel's symbol, one with a constant bank's, one with a list of symbols.
const unsigned char BY_KERNEL[] = {0x2f, 0x11, 0x12, 0x23};
constexpr unsigned char BY_BANK = 0x0a, BY_LIST = 0x0f, HAS_BYTES = 4;

using Numbers = std::map<std::uint32_t, std::uint32_t>;

template <class Value>
Value read(const std::string &bytes, std::size_t at) {
    Value value{};
    if (at + sizeof value <= bytes.size()) std::memcpy(&value, bytes.data() + at, sizeof value);
    return value;
}

template <class Value>
void write(std::string *bytes, std::size_t at, Value value) {
    if (at + sizeof value <= bytes->size()) std::memcpy(&(*bytes)[at], &value, sizeof value);
}

struct Pruner {
    Elf elf;
    std::set<std::size_t> gone;  // sections
    Numbers section_of, symbol_of;
    std::string symbol_bytes, symbol_strings = std::string(1, '\0');
    std::uint32_t num_local = 0;
    mutable std::string lost;  // why it cannot be pruned

    void choose(const std::set<std::string> &keep) {
        std::set<std::string> dropped;
        for (std::size_t number = 0; number < elf.symbols.size(); number++)
            if (elf.is_kernel(number) && !keep.count(elf.symbol_names[number])) dropped.insert(elf.symbol_names[number]);
        for (std::size_t number = 0; number < elf.sections.size(); number++) {
            std::string kernel = kernel_of(elf.names[number]);
            bool is_table = number == elf.header.names || number == elf.symbol_table || number == elf.symbol_strings;
            if (!is_table && dropped.count(kernel)) gone.insert(number);
        }
        for (std::size_t number = 0; number < elf.sections.size(); number++) {
            const Section &section = elf.sections[number];
            bool relocates = section.type == RELA || section.type == REL;
            if (relocates && section.info < elf.names.size() && (gone.count(section.info) || elf.names[section.info] == FRAMES))
                gone.insert(number);
        }
        for (std::size_t number = 0; number < elf.sections.size(); number++) {
            if (gone.count(number)) continue;
            section_of.emplace(number, section_of.size());
            auto &types = KNOWN_TYPES;
            bool known = std::find(std::begin(types), std::end(types), elf.sections[number].type) != std::end(types);
            if (!known && elf.sections[number].bytes) lose("it has a section " + elf.names[number] + " of an unknown kind");
        }
    }

    // Whose section it is, by its name; empty: no kernel's.
    static std::string kernel_of(std::string name) {
        for (const std::string relocations : {".rela.", ".rel."})
            if (name.compare(0, relocations.size(), relocations) == 0) name.erase(0, relocations.size() - 1);
        for (const std::string prefix : OF_A_KERNEL)
            if (name.compare(0, prefix.size(), prefix) == 0) return name.substr(prefix.size());
        if (name.compare(0, sizeof CONSTANTS - 1, CONSTANTS)) return "";
        std::size_t behind = name.find_first_not_of("0123456789", sizeof CONSTANTS - 1);
        return behind == std::string::npos || name[behind] != '.' ? "" : name.substr(behind + 1);
    }

    // Remembers the first reason why the image cannot be pruned.
    void lose(const std::string &why) const {
        if (lost.empty()) lost = why;
    }

    void number_symbols() {
        for (std::size_t number = 0; number < elf.symbols.size(); number++) {
            Symbol symbol = elf.symbols[number];
            bool placed = symbol.section && symbol.section < SPECIAL_SECTIONS;
            if (placed && gone.count(symbol.section)) continue;
            symbol_of.emplace(number, symbol_of.size());
            const std::string &name = elf.symbol_names[number];
            symbol.name = name.empty() ? 0 : symbol_strings.size();
            if (!name.empty()) symbol_strings += name + '\0';
            if (placed) symbol.section = section_of.at(symbol.section);
            symbol_bytes.append(reinterpret_cast<const char *>(&symbol), sizeof symbol);
            if (symbol.info >> 4 == 0) num_local = symbol_of.size();
        }
    }

    std::uint32_t renumbered(std::uint32_t symbol, const std::string &by) const {
        auto found = symbol_of.find(symbol);
        if (found != symbol_of.end()) return found->second;
        lose(by + " names the symbol " + std::to_string(symbol) + ", which is left out");
        return symbol;
    }

    std::string notes(std::size_t number) const {
        const std::string &bytes = elf.contents[number], &name = elf.names[number];
        bool of_module = name == ".nv.info";
        std::string kept;
        for (std::size_t at = 0; at + 4 <= bytes.size();) {
            unsigned char form = bytes[at], kind = bytes[at + 1];
            std::size_t length = 4 + (form == HAS_BYTES ? read<std::uint16_t>(bytes, at + 2) : 0);
            std::string note = bytes.substr(at, length);
            at += length;
            if (form == HAS_BYTES) {
                bool by_kernel = std::find(std::begin(BY_KERNEL), std::end(BY_KERNEL), kind) != std::end(BY_KERNEL);
                std::uint32_t symbol = read<std::uint32_t>(note, 4);
                if (of_module && by_kernel && !symbol_of.count(symbol)) continue;
                if ((of_module && by_kernel) || kind == BY_BANK) write(&note, 4, renumbered(symbol, name));
                for (std::size_t place = 4; kind == BY_LIST && place + 4 <= note.size(); place += 4)
                    write(&note, place, renumbered(read<std::uint32_t>(note, place), name));
            }
            kept += note;
        }
        return kept;
    }

    std::string calls(const std::string &bytes) const {
        std::string kept;
        auto number = [this](std::uint32_t symbol) {
            return !symbol || symbol >= 0xfffffff0 ? symbol : renumbered(symbol, "the graph of calls");
        };
        for (std::size_t at = 0; at + 8 <= bytes.size(); at += 8) {
            std::uint32_t from = read<std::uint32_t>(bytes, at), to = read<std::uint32_t>(bytes, at + 4);
            if (from && from < 0xfffffff0 && !symbol_of.count(from)) continue;
            std::string pair(8, '\0');
            write(&pair, 0, number(from));
            write(&pair, 4, number(to));
            kept += pair;
        }
        return kept;
    }

    std::string relocations(std::size_t number, std::size_t entry_bytes) const {
        std::string moved = elf.contents[number];
        for (std::size_t at = 0; at + entry_bytes <= moved.size(); at += entry_bytes) {
            std::uint64_t info = read<std::uint64_t>(moved, at + 8);
            write(&moved, at + 8, std::uint64_t(renumbered(info >> 32, elf.names[number])) << 32 | (info & 0xffffffff));
        }
        return moved;
    }

    std::string content(std::size_t number) const {
        const Section &section = elf.sections[number];
        if (number == elf.symbol_table) return symbol_bytes;
        if (number == elf.symbol_strings) return symbol_strings;
        if (section.type == NV_INFO) return notes(number);
        if (section.type == NV_CALLGRAPH) return calls(elf.contents[number]);
        if (section.type == RELA || section.type == REL) return relocations(number, section.type == RELA ? 24 : 16);
        if (elf.names[number] == FRAMES) return "";
        return elf.contents[number];
    }

    Section described(std::size_t number) const {
        Section section = elf.sections[number];
        const std::string &name = elf.names[number];
        auto moved = [&](std::uint32_t old) {
            auto found = section_of.find(old);
            if (found != section_of.end()) return found->second;
            lose(name + " names the section " + std::to_string(old) + ", which is left out");
            return old;
        };
        section.link = moved(section.link);
        bool relocates = section.type == RELA || section.type == REL;
        if (number == elf.symbol_table)
            section.info = num_local;
        else if (name.compare(0, 6, ".text.") == 0)  // a kernel's symbol, below its number of registers
            section.info = (section.info & 0xff000000) | renumbered(section.info & 0xffffff, name);
        else if (relocates || (section.flags & INFO_IS_SECTION) || !kernel_of(name).empty())  // only younger compilers set the flag
            section.info = moved(section.info);
        return section;
    }

    std::string lay_out() {
        std::vector<std::size_t> kept;
        for (auto &[old, now] : section_of) kept.push_back(old);
        std::map<std::size_t, Section> made;
        std::map<std::size_t, std::string> contents;
        std::string strings(1, '\0');
        for (std::size_t number : kept) {
            made[number] = described(number);
            contents[number] = content(number);
            made[number].name = elf.names[number].empty() ? 0 : strings.size();
            if (!elf.names[number].empty()) strings += elf.names[number] + '\0';
        }
        contents[elf.header.names] = strings;
        std::string out(sizeof(ElfHeader), '\0');
        auto by_offset = [this](std::size_t left, std::size_t right) { return elf.sections[left].offset < elf.sections[right].offset; };
        std::vector<std::size_t> order = kept;
        std::stable_sort(order.begin(), order.end(), by_offset);
        for (std::size_t number : order) {
            Section &section = made[number];
            if (!section.type) continue;
            if (section.type != NO_BITS) {
                while (out.size() % std::max<std::uint64_t>(1, section.align)) out += '\0';
                section.bytes = contents[number].size();
            }
            section.offset = out.size();
            out += contents[number];
        }
        while (out.size() % 8) out += '\0';
        ElfHeader header = elf.header;
        header.sections = out.size();
        header.num_sections = kept.size();
        header.names = section_of.at(elf.header.names);
        for (std::size_t number : kept) out.append(reinterpret_cast<const char *>(&made[number]), sizeof(Section));
        std::vector<Segment> segments;
        for (const Segment &segment : elf.segments)
            if (segment.offset == elf.header.segments || placed(segment, order, made).memory_bytes) segments.push_back(segment);
        header.segments = segments.empty() ? 0 : out.size();
        header.num_segments = segments.size();
        for (Segment segment : segments) {
            segment = segment.offset == elf.header.segments ? table(segment, header) : placed(segment, order, made);
            out.append(reinterpret_cast<const char *>(&segment), sizeof segment);
        }
        std::memcpy(&out[0], &header, sizeof header);
        return out;
    }

    static Segment table(Segment segment, const ElfHeader &header) {
        segment.offset = header.segments;
        segment.file_bytes = segment.memory_bytes = header.num_segments * sizeof(Segment);
        return segment;
    }

    // A segment is what its sections are now: those with bytes, and behind them memory that begins as zeros.
    Segment placed(Segment segment, const std::vector<std::size_t> &order, const std::map<std::size_t, Section> &made) const {
        const std::uint64_t begin = segment.offset, end = begin + segment.file_bytes;
        const bool has_zeros = segment.memory_bytes > segment.file_bytes;
        std::uint64_t first = ~std::uint64_t(0), last = 0, zeros = 0;
        for (std::size_t number : order) {
            const Section &was = elf.sections[number], &now = made.at(number);
            if (!was.type || was.offset < begin || was.offset > end) continue;
            if (was.type == NO_BITS) {
                if (!has_zeros || !(was.flags & WRITABLE)) continue;
                std::uint64_t align = std::max<std::uint64_t>(1, was.align);
                zeros = (zeros + align - 1) / align * align + was.bytes;
            } else if (!was.bytes || was.bytes > end - was.offset) {
                continue;
            }
            first = std::min(first, now.offset);
            last = std::max(last, now.offset + (was.type == NO_BITS ? 0 : now.bytes));
        }
        segment.offset = first > last ? 0 : first;
        segment.file_bytes = first > last ? 0 : last - first;
        segment.memory_bytes = segment.file_bytes + zeros;
        return segment;
    }
};

}  // namespace

std::set<std::string> kernels_of(const std::string &image) {
    std::set<std::string> found;
    Elf elf;
    if (elf.parse(image))
        for (std::size_t number = 0; number < elf.symbols.size(); number++)
            if (elf.is_kernel(number)) found.insert(elf.symbol_names[number]);
    return found;
}

std::set<std::string> names_in(const char *names, std::uint64_t bytes) {
    std::set<std::string> found;
    for (std::uint64_t at = 0; at < bytes; at += std::strlen(names + at) + 1) found.insert(names + at);
    return found;
}

int prune_image(const std::string &image, const std::set<std::string> &keep, std::string *pruned) {
    Pruner pruner;
    if (!pruner.elf.parse(image)) return fail(MISUSED, "a kernel image is no ELF file that can be read");
    for (const std::string &name : keep) {
        auto &names = pruner.elf.symbol_names;
        if (std::find(names.begin(), names.end(), name) == names.end()) return fail(MISUSED, "a kernel image has no kernel " + name);
    }
    pruner.choose(keep);
    pruner.number_symbols();
    *pruned = pruner.lay_out();
    return pruner.lost.empty() ? OK : fail(MISUSED, "a kernel image cannot be pruned: " + pruner.lost);
}

}  // namespace pilotlight

using namespace pilotlight;

// Writes the pruned image to `out` of `out_bytes`, and how long it is; `keep` are names, each ended by a zero.
PILOTLIGHT_EXPORT int pilotlight_image_prune(const char *image, std::uint64_t bytes, const char *keep, std::uint64_t keep_bytes, char *out,
                                             std::uint64_t out_bytes, std::uint64_t *made_bytes) {
    std::string pruned;
    if (int failed = prune_image(std::string(image, bytes), names_in(keep, keep_bytes), &pruned)) return failed;
    *made_bytes = pruned.size();
    if (pruned.size() > out_bytes) return fail(OUT_OF_ROOM, "the image needs " + std::to_string(pruned.size()) + " bytes");
    std::memcpy(out, pruned.data(), pruned.size());
    return OK;
}
