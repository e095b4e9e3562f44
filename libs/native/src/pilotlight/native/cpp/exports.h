// Functions of this library that its own other parts call, too, as Python does.
#pragma once

#include "driver.h"

namespace pilotlight {
class Arena;
class Archive;
}  // namespace pilotlight

extern "C" {
int pilotlight_driver_open(const char *path);
int pilotlight_device_open(int ordinal, CUcontext *context);
int pilotlight_device_memory(CUcontext context, std::uint64_t *free_bytes, std::uint64_t *total_bytes);
int pilotlight_arena_open(CUcontext context, int ordinal, std::uint64_t address, std::uint64_t bytes, pilotlight::Arena **arena);
int pilotlight_arena_back(pilotlight::Arena *arena, const std::uint64_t *ranges, std::uint64_t count, std::uint64_t chunk_bytes);
int pilotlight_arena_unback(pilotlight::Arena *arena, const std::uint64_t *ranges, std::uint64_t count);
void pilotlight_arena_close(pilotlight::Arena *arena, int done);
int pilotlight_archive_open(CUcontext context, const char *bytes, std::uint64_t size, std::uint64_t arena_address, pilotlight::Archive **archive,
                            std::uint64_t *num_graphs);
std::uint64_t pilotlight_archive_tag(pilotlight::Archive *archive, std::uint32_t number);
int pilotlight_archive_load(pilotlight::Archive *archive, std::uint32_t number);
int pilotlight_archive_advance(pilotlight::Archive *archive, std::uint32_t number, CUstream stream, std::uint64_t *left);
void pilotlight_archive_close(pilotlight::Archive *archive);
void pilotlight_blake3(const std::uint8_t *data, std::uint64_t bytes, std::uint8_t *digest);
}
