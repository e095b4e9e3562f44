// ELF as the driver's kernel images use it: sections, symbols, strings, with every access checked.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

namespace pilotlight {

struct ElfHeader {
    unsigned char ident[16];
    std::uint16_t type, machine;
    std::uint32_t version;
    std::uint64_t entry, segments, sections;
    std::uint32_t flags;
    std::uint16_t header_bytes, segment_bytes, num_segments, section_bytes, num_sections, names;
};
static_assert(sizeof(ElfHeader) == 64);

struct Section {
    std::uint32_t name, type;
    std::uint64_t flags, address, offset, bytes;
    std::uint32_t link, info;
    std::uint64_t align, entry_bytes;
};
static_assert(sizeof(Section) == 64);

struct Segment {
    std::uint32_t type, flags;
    std::uint64_t offset, address, physical, file_bytes, memory_bytes, align;
};
static_assert(sizeof(Segment) == 56);

struct Symbol {
    std::uint32_t name;
    unsigned char info, other;
    std::uint16_t section;
    std::uint64_t value, bytes;
};
static_assert(sizeof(Symbol) == 24);

constexpr char ELF_BEGINS[] = "\x7f" "ELF\x02\x01";  // 64 bits, little-endian
constexpr std::uint32_t SYMBOLS = 2, RELA = 4, NO_BITS = 8, REL = 9, NV_INFO = 0x70000000, NV_CALLGRAPH = 0x70000001;
constexpr std::uint64_t INFO_IS_SECTION = 0x40, WRITABLE = 1;
constexpr unsigned char KERNEL_ENTRY = 0x10;
constexpr std::uint16_t SPECIAL_SECTIONS = 0xff00;
constexpr std::uint64_t MAX_ALIGN = 1 << 16, MAX_TIMES = 4;

struct Elf {
    ElfHeader header;
    std::vector<Section> sections;
    std::vector<Segment> segments;
    std::vector<std::string> names;     // of the sections
    std::vector<std::string> contents;  // of the sections
    std::vector<Symbol> symbols;
    std::vector<std::string> symbol_names;
    std::size_t symbol_table = 0;  // section numbers
    std::size_t symbol_strings = 0;

    // False: it is no such file, or a broken one.
    bool parse(const std::string &data) {
        if (data.size() < sizeof header || std::memcmp(data.data(), ELF_BEGINS, sizeof ELF_BEGINS - 1))
            return false;
        std::memcpy(&header, data.data(), sizeof header);
        if (!table(data, header.sections, header.num_sections, header.section_bytes, &sections) ||
            !table(data, header.segments, header.num_segments, header.segment_bytes, &segments) || header.names >= sections.size())
            return false;
        std::uint64_t total = 0;
        for (const Section &section : sections) {
            bool empty = section.type == 0 || section.type == NO_BITS;
            if (!empty && (section.offset > data.size() || section.bytes > data.size() - section.offset)) return false;
            // A broken file must not make us fill the memory: with padding, or with sections that are the same bytes again and again.
            total += empty ? 0 : section.bytes;
            if (section.align > MAX_ALIGN || total > MAX_TIMES * data.size()) return false;
            contents.push_back(empty ? std::string() : data.substr(section.offset, section.bytes));
        }
        for (const Section &section : sections) {
            if (section.name > contents[header.names].size()) return false;
            names.emplace_back(contents[header.names].c_str() + section.name);
        }
        for (std::size_t number = 0; number < sections.size(); number++)
            if (sections[number].type == SYMBOLS) symbol_table = number;
        if (!symbol_table || sections[symbol_table].link >= sections.size()) return false;
        symbol_strings = sections[symbol_table].link;
        symbols.resize(contents[symbol_table].size() / sizeof(Symbol));
        if (symbols.empty()) return false;
        std::memcpy(symbols.data(), contents[symbol_table].data(), symbols.size() * sizeof(Symbol));
        for (const Symbol &symbol : symbols) {
            if (symbol.name > contents[symbol_strings].size()) return false;
            if (symbol.section >= sections.size() && symbol.section < SPECIAL_SECTIONS) return false;
            symbol_names.emplace_back(contents[symbol_strings].c_str() + symbol.name);
        }
        return true;
    }

    bool is_kernel(std::size_t symbol) const {
        return (symbols[symbol].info & 15) == 2 && (symbols[symbol].other & KERNEL_ENTRY) && symbols[symbol].section;
    }

  private:
    template <class Entry>
    static bool table(const std::string &data, std::uint64_t offset, std::size_t count, std::size_t entry_bytes, std::vector<Entry> *found) {
        if (count && (entry_bytes != sizeof(Entry) || offset > data.size() || count > (data.size() - offset) / sizeof(Entry))) return false;
        found->resize(count);
        if (count) std::memcpy(found->data(), data.data() + offset, count * sizeof(Entry));
        return true;
    }
};

}  // namespace pilotlight
