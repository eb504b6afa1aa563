// Memory of devices, as memory of the host at addresses of its own.
#pragma once

#include "device.hpp"

namespace standin {

// Address space of whole pages that cannot be touched yet; nullptr: there is none left.
void* reserve(std::size_t bytes);
void unreserve(void* start, std::size_t bytes);
void map(void* start, std::size_t bytes, int device);
void unmap(void* start, std::size_t bytes);

// The block of device memory that an address lies in.
bool block_at(std::uintptr_t address, std::uintptr_t* start, std::size_t* bytes);

}  // namespace standin
