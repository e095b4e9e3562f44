// BLAKE3 (O'Connor, Aumasson, Neves, Wilcox-O'Hearn, 2020), plain hashing alone, several chunks at once in a vector's lanes.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pilotlight {

constexpr std::size_t BLAKE3_CHUNK_BYTES = 1024, BLAKE3_BLOCK_BYTES = 64, BLAKE3_DIGEST_BYTES = 32;
// The largest input of one hash: its tree lies on the stack.
constexpr std::size_t BLAKE3_MOST_BYTES = 1 << 20;

constexpr std::uint32_t BLAKE3_IV[8] = {0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A,
                                        0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19};
constexpr int BLAKE3_SCHEDULE[7][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8},
    {3, 4, 10, 12, 13, 2, 7, 14, 6, 5, 9, 0, 11, 15, 8, 1}, {10, 7, 12, 9, 14, 3, 13, 15, 4, 0, 11, 2, 5, 8, 1, 6},
    {12, 13, 9, 11, 15, 10, 14, 8, 7, 2, 5, 3, 0, 1, 6, 4}, {9, 14, 11, 5, 8, 12, 15, 1, 13, 3, 0, 10, 2, 6, 4, 7},
    {11, 15, 5, 0, 1, 9, 8, 6, 14, 10, 2, 12, 3, 4, 7, 13},
};
enum Blake3Flag : std::uint32_t { CHUNK_START = 1, CHUNK_END = 2, PARENT = 4, ROOT = 8 };

// Inputs of the same number of whole blocks, one behind the other; the chaining value of each goes to `values`, 32 bytes each.
struct Blake3Inputs {
    const std::uint8_t *start;
    std::size_t blocks;      // of each
    std::uint64_t counter;   // of the first
    bool counts;             // whether the next one has the next counter: chunks do, parents do not
    std::uint32_t flags, first_flag, last_flag;
};

// As many as the vector has lanes.
void blake3_avx512(const Blake3Inputs &inputs, std::uint8_t *values);
void blake3_avx2(const Blake3Inputs &inputs, std::uint8_t *values);
void blake3_portable(const Blake3Inputs &inputs, std::uint8_t *values);

// The instruction set that hashes use here: "avx512", "avx2" or "portable".
const char *blake3_kind();

// One hash that takes its input in pieces; at most BLAKE3_MOST_BYTES.
class Blake3 {
  public:
    // Begins anew.
    void restart() { chunks_ = 0; }

    // The next bytes. All but the last call give whole chunks; nothing is kept of them but their chaining values.
    void add(const std::uint8_t *data, std::size_t bytes, bool is_last);

    // Of everything that was added, which was at least one byte.
    void digest(std::uint8_t out[BLAKE3_DIGEST_BYTES]);

  private:
    void add_chunk(const std::uint8_t *data, std::size_t bytes, bool is_only);

    std::size_t chunks_ = 0;
    alignas(64) std::uint8_t values_[(BLAKE3_MOST_BYTES / BLAKE3_CHUNK_BYTES) * BLAKE3_DIGEST_BYTES];
};

}  // namespace pilotlight
