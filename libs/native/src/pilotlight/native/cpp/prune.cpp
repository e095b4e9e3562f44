// Smaller kernel images: a library's module holds a thousand kernels of which a graph uses one, and loading takes time by their bytes.
//
// Code, constants and notes of kernels that are not used are left out, with their symbols; what numbers sections or symbols is renumbered.
#include <algorithm>
#include <map>

#include "driver.h"
#include "elf64.h"
#include "images.h"

namespace pilotlight {

namespace {

const char *const OF_A_KERNEL[] = {".text.",      ".nv.info.",  ".nv.constant0.", ".nv.constant2.", ".nv.shared.",
                                   ".nv.local.",  ".rela.text.", ".rel.text.",    ".nv.capmerc.text."};
const char *const OF_NOBODY[] = {".debug_frame", ".rela.debug_frame", ".rel.debug_frame"};
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

    void choose(const std::set<std::string> &keep) {
        std::set<std::string> dropped;
        for (std::size_t number = 0; number < elf.symbols.size(); number++)
            if (elf.is_kernel(number) && !keep.count(elf.symbol_names[number])) dropped.insert(elf.symbol_names[number]);
        for (std::size_t number = 0; number < elf.sections.size(); number++) {
            const std::string &name = elf.names[number];
            bool is_table = number == elf.header.names || number == elf.symbol_table || number == elf.symbol_strings;
            for (const char *own : OF_NOBODY)
                if (name == own) gone.insert(number);
            for (const std::string prefix : OF_A_KERNEL)
                if (name.compare(0, prefix.size(), prefix) == 0 && dropped.count(name.substr(prefix.size()))) gone.insert(number);
            if (is_table) gone.erase(number);
            if (!gone.count(number)) section_of.emplace(number, section_of.size());
        }
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

    std::uint32_t renumbered(std::uint32_t symbol) const {
        auto found = symbol_of.find(symbol);
        return found == symbol_of.end() ? symbol : found->second;
    }

    std::string notes(const std::string &bytes, bool of_module) const {
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
                if ((of_module && by_kernel) || kind == BY_BANK) write(&note, 4, renumbered(symbol));
                for (std::size_t place = 4; kind == BY_LIST && place + 4 <= note.size(); place += 4)
                    write(&note, place, renumbered(read<std::uint32_t>(note, place)));
            }
            kept += note;
        }
        return kept;
    }

    std::string calls(const std::string &bytes) const {
        std::string kept;
        auto known = [this](std::uint32_t symbol) { return !symbol || symbol >= 0xfffffff0 || symbol_of.count(symbol); };
        for (std::size_t at = 0; at + 8 <= bytes.size(); at += 8) {
            std::uint32_t from = read<std::uint32_t>(bytes, at), to = read<std::uint32_t>(bytes, at + 4);
            if (!known(from) || !known(to)) continue;
            std::string pair(8, '\0');
            write(&pair, 0, renumbered(from));
            write(&pair, 4, renumbered(to));
            kept += pair;
        }
        return kept;
    }

    std::string relocations(const std::string &bytes, std::size_t entry_bytes) const {
        std::string kept;
        for (std::size_t at = 0; at + entry_bytes <= bytes.size(); at += entry_bytes) {
            std::string entry = bytes.substr(at, entry_bytes);
            std::uint64_t info = read<std::uint64_t>(entry, 8);
            auto found = symbol_of.find(info >> 32);
            if (found == symbol_of.end()) continue;
            write(&entry, 8, std::uint64_t(found->second) << 32 | (info & 0xffffffff));
            kept += entry;
        }
        return kept;
    }

    std::string content(std::size_t number) const {
        const Section &section = elf.sections[number];
        if (number == elf.symbol_table) return symbol_bytes;
        if (number == elf.symbol_strings) return symbol_strings;
        if (section.type == NV_INFO) return notes(elf.contents[number], elf.names[number] == ".nv.info");
        if (section.type == NV_CALLGRAPH) return calls(elf.contents[number]);
        if (section.type == RELA || section.type == REL) return relocations(elf.contents[number], section.type == RELA ? 24 : 16);
        return elf.contents[number];
    }

    // Its notes, constants and memory name a kernel's code by the number of its section; only younger compilers have a flag for that.
    static bool of_kernel(const std::string &name) {
        return std::any_of(std::begin(OF_A_KERNEL), std::end(OF_A_KERNEL), [&name](const std::string &prefix) {
            return name.compare(0, prefix.size(), prefix) == 0;
        });
    }

    Section described(std::size_t number) {
        Section section = elf.sections[number];
        const std::string &name = elf.names[number];
        auto moved = [this](std::uint32_t old) { return section_of.count(old) ? section_of.at(old) : old; };
        if (section.link) section.link = moved(section.link);
        if (number == elf.symbol_table)
            section.info = num_local;
        else if (name.compare(0, 6, ".text.") == 0)  // a kernel's symbol, below its number of registers
            section.info = (section.info & 0xff000000) | renumbered(section.info & 0xffffff);
        else if (section.type == RELA || section.type == REL || (section.flags & INFO_IS_SECTION) || of_kernel(name))
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
        header.segments = elf.segments.empty() ? 0 : out.size();
        for (Segment segment : elf.segments) {
            place(&segment, order, made, header.segments);
            out.append(reinterpret_cast<const char *>(&segment), sizeof segment);
        }
        std::memcpy(&out[0], &header, sizeof header);
        return out;
    }

    // A segment is what its sections are now.
    void place(Segment *segment, const std::vector<std::size_t> &order, std::map<std::size_t, Section> &made, std::uint64_t table) {
        const Segment old = *segment;
        segment->offset = table;
        if (old.offset == elf.header.segments) return;
        std::uint64_t first = ~std::uint64_t(0), last = 0;
        for (std::size_t number : order) {
            const Section &was = elf.sections[number];
            if (!was.type || was.type == NO_BITS || !was.bytes || was.offset < old.offset || was.offset + was.bytes > old.offset + old.file_bytes)
                continue;
            first = std::min(first, made[number].offset);
            last = std::max(last, made[number].offset + made[number].bytes);
        }
        segment->file_bytes = segment->memory_bytes = 0;
        if (first > last) return;
        segment->offset = first;
        segment->file_bytes = last - first;
        segment->memory_bytes = last - first + (old.memory_bytes - old.file_bytes);
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
    return OK;
}

}  // namespace pilotlight

using namespace pilotlight;

// Writes the pruned image to `out` of `out_bytes`, and how long it is; `keep` are names, each ended by a zero.
PILOTLIGHT_EXPORT int pilotlight_image_prune(const char *image, std::uint64_t bytes, const char *keep, std::uint64_t keep_bytes, char *out,
                                             std::uint64_t out_bytes, std::uint64_t *made_bytes) {
    std::set<std::string> names;
    for (std::uint64_t at = 0; at < keep_bytes; at += std::strlen(keep + at) + 1) names.insert(keep + at);
    std::string pruned;
    if (int failed = prune_image(std::string(image, bytes), names, &pruned)) return failed;
    *made_bytes = pruned.size();
    if (pruned.size() > out_bytes) return fail(OUT_OF_ROOM, "the image needs " + std::to_string(pruned.size()) + " bytes");
    std::memcpy(out, pruned.data(), pruned.size());
    return OK;
}
