// The tree above the chunks, and which instruction set compresses them.
//
//     chunks     0   1   2   3   4        1024 bytes each, the last one what is left
//     parents    '-.-'   '-.-'   |        two and two, level by level; who has no pair goes up as it is
//                  '---.---'     |
//                      '----.----'        the root
#include "blake3.h"

#include <cstring>

namespace pilotlight {

namespace {

struct Engine {
    const char *kind;
    std::size_t lanes;
    void (*hash)(const Blake3Inputs &, std::uint8_t *);
};

Engine chosen() {
#ifdef __x86_64__
    if (__builtin_cpu_supports("avx512f")) return {"avx512", 16, blake3_avx512};
    if (__builtin_cpu_supports("avx2")) return {"avx2", 8, blake3_avx2};
#endif
    return {"portable", 4, blake3_portable};
}

const Engine &engine() {
    static const Engine found = chosen();
    return found;
}

std::uint32_t rotated(std::uint32_t word, int bits) { return (word >> bits) | (word << (32 - bits)); }

void mix(std::uint32_t *v, int a, int b, int c, int d, std::uint32_t first, std::uint32_t second) {
    v[a] += v[b] + first;
    v[d] = rotated(v[d] ^ v[a], 16);
    v[c] += v[d];
    v[b] = rotated(v[b] ^ v[c], 12);
    v[a] += v[b] + second;
    v[d] = rotated(v[d] ^ v[a], 8);
    v[c] += v[d];
    v[b] = rotated(v[b] ^ v[c], 7);
}

void compress(std::uint32_t h[8], const std::uint8_t *block, std::uint32_t bytes, std::uint64_t counter, std::uint32_t flags) {
    std::uint8_t padded[BLAKE3_BLOCK_BYTES] = {};
    std::memcpy(padded, block, bytes);
    std::uint32_t words[16], v[16];
    std::memcpy(words, padded, sizeof words);
    std::memcpy(v, h, 32);
    std::memcpy(v + 8, BLAKE3_IV, 16);
    v[12] = static_cast<std::uint32_t>(counter);
    v[13] = static_cast<std::uint32_t>(counter >> 32);
    v[14] = bytes;
    v[15] = flags;
    for (auto &at : BLAKE3_SCHEDULE) {
        mix(v, 0, 4, 8, 12, words[at[0]], words[at[1]]);
        mix(v, 1, 5, 9, 13, words[at[2]], words[at[3]]);
        mix(v, 2, 6, 10, 14, words[at[4]], words[at[5]]);
        mix(v, 3, 7, 11, 15, words[at[6]], words[at[7]]);
        mix(v, 0, 5, 10, 15, words[at[8]], words[at[9]]);
        mix(v, 1, 6, 11, 12, words[at[10]], words[at[11]]);
        mix(v, 2, 7, 8, 13, words[at[12]], words[at[13]]);
        mix(v, 3, 4, 9, 14, words[at[14]], words[at[15]]);
    }
    for (int word = 0; word < 8; word++) h[word] = v[word] ^ v[word + 8];
}

// One parent of two chaining values that lie side by side; `out` may be where they lie.
void parent(const std::uint8_t *pair, std::uint32_t flags, std::uint8_t *out) {
    std::uint32_t h[8];
    std::memcpy(h, BLAKE3_IV, sizeof h);
    compress(h, pair, BLAKE3_BLOCK_BYTES, 0, PARENT | flags);
    std::memcpy(out, h, sizeof h);
}

}  // namespace

const char *blake3_kind() { return engine().kind; }

void Blake3::add(const std::uint8_t *data, std::size_t bytes, bool is_last) {
    const auto [kind, lanes, hash] = engine();
    // A chunk that is the whole input is a root, and has another flag.
    bool is_only = is_last && !chunks_ && bytes <= BLAKE3_CHUNK_BYTES;
    while (!is_only && bytes >= lanes * BLAKE3_CHUNK_BYTES) {
        hash({data, BLAKE3_CHUNK_BYTES / BLAKE3_BLOCK_BYTES, chunks_, true, 0, CHUNK_START, CHUNK_END},
             values_ + chunks_ * BLAKE3_DIGEST_BYTES);
        chunks_ += lanes;
        data += lanes * BLAKE3_CHUNK_BYTES;
        bytes -= lanes * BLAKE3_CHUNK_BYTES;
    }
    while (bytes) {
        std::size_t now = bytes < BLAKE3_CHUNK_BYTES ? bytes : BLAKE3_CHUNK_BYTES;
        add_chunk(data, now, is_only);
        data += now;
        bytes -= now;
    }
}

void Blake3::add_chunk(const std::uint8_t *data, std::size_t bytes, bool is_only) {
    std::uint32_t h[8];
    std::memcpy(h, BLAKE3_IV, sizeof h);
    for (std::size_t at = 0; at < bytes; at += BLAKE3_BLOCK_BYTES) {
        bool ends = at + BLAKE3_BLOCK_BYTES >= bytes;
        std::uint32_t flags = (at ? 0 : CHUNK_START) | (ends ? CHUNK_END : 0) | (ends && is_only ? ROOT : 0);
        compress(h, data + at, static_cast<std::uint32_t>(ends ? bytes - at : BLAKE3_BLOCK_BYTES), chunks_, flags);
    }
    std::memcpy(values_ + chunks_++ * BLAKE3_DIGEST_BYTES, h, sizeof h);
}

void Blake3::digest(std::uint8_t out[BLAKE3_DIGEST_BYTES]) {
    const auto [kind, lanes, hash] = engine();
    std::size_t left = chunks_;
    while (left > 2) {
        std::size_t pairs = left / 2, done = 0;
        for (; done + lanes <= pairs; done += lanes) {
            // A level is written over the one below it, always behind what is still to be read.
            alignas(64) std::uint8_t level[16 * BLAKE3_DIGEST_BYTES];
            hash({values_ + 2 * done * BLAKE3_DIGEST_BYTES, 1, 0, false, PARENT, 0, 0}, level);
            std::memcpy(values_ + done * BLAKE3_DIGEST_BYTES, level, lanes * BLAKE3_DIGEST_BYTES);
        }
        for (; done < pairs; done++) parent(values_ + 2 * done * BLAKE3_DIGEST_BYTES, 0, values_ + done * BLAKE3_DIGEST_BYTES);
        if (left % 2) std::memmove(values_ + pairs * BLAKE3_DIGEST_BYTES, values_ + (left - 1) * BLAKE3_DIGEST_BYTES, BLAKE3_DIGEST_BYTES);
        left = pairs + left % 2;
    }
    if (left == 2) parent(values_, ROOT, values_);
    std::memcpy(out, values_, BLAKE3_DIGEST_BYTES);
    restart();
}

}  // namespace pilotlight
