"""An emulated libcuda of two GPUs: device memory is host memory behind files, so that contents survive a remap.

Kept here are rules of the real driver that callers must keep: calls on memory need a current context of the right GPU,
an unmap must match one map, an object is released once, a range is freed empty, memory without access faults. Layouts
are written out from cuda.h, independent of the ctypes ones under test.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

GPU_BYTES = 64 << 20
CODE = r"""
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
enum { INVALID = 1, NOMEM = 2, NOCONTEXT = 201, ALREADY = 704, GPUS = 2, MANY = 256 };
#define TOTAL (64ul << 20)
typedef uint64_t addr;
typedef struct { int type, handles; struct { int type, id; } location; void *win32; unsigned char flags[8]; } prop;
typedef struct { struct { int type, id; } location; int flags; } access_of;
typedef struct { char bytes[64]; } ipc;
static struct { int live, gpu, fd, mapped; size_t size; } objects[MANY];
static struct { int live; addr at; size_t size; int object; } maps[MANY];
static struct { int live, gpu; addr at; size_t size; } plain[MANY];
static size_t used[GPUS]; static int context[64], depth, peers, ranges;
static int current(void) { return depth ? context[depth - 1] : -1; }
int cuInit(unsigned flags) { return flags; }
int cuDeviceGetCount(int *n) { *n = GPUS; return 0; }
int cuDeviceGet(int *d, int i) { if (i < 0 || i >= GPUS) return 101; *d = i; return 0; }
int cuDeviceGetPCIBusId(char *s, int n, int d) { snprintf(s, n, "0000:%02X:00.0", 0x1a + d); return 0; }
int cuDevicePrimaryCtxRetain(void **c, int d) { *c = (void *)(uintptr_t)(0xc0 + d); return 0; }
int cuCtxPushCurrent_v2(void *c) { context[depth++] = (int)(uintptr_t)c - 0xc0; return 0; }
int cuCtxPopCurrent_v2(void **c) { if (!depth) return NOCONTEXT; *c = 0; depth--; return 0; }
int cuCtxSynchronize(void) { return current() < 0 ? NOCONTEXT : 0; }
int cuCtxEnablePeerAccess(void *c, unsigned f) {
    if (current() < 0 || (int)(uintptr_t)c - 0xc0 == current() || f) return INVALID;
    return peers++ ? ALREADY : 0;
}
int cuDeviceCanAccessPeer(int *yes, int a, int b) { *yes = a != b; return 0; }
int cuMemGetInfo_v2(size_t *free_, size_t *total) {
    if (current() < 0) return NOCONTEXT;
    *total = TOTAL; *free_ = TOTAL - used[current()]; return 0;
}
static int take(int gpu, size_t n) { if (used[gpu] + n > TOTAL) return NOMEM; used[gpu] += n; return 0; }
int cuMemAlloc_v2(addr *p, size_t n) {
    int gpu = current(); if (gpu < 0) return NOCONTEXT;
    if (take(gpu, n)) return NOMEM;
    for (int i = 0; i < MANY; i++) if (!plain[i].live) {
        plain[i].live = 1; plain[i].gpu = gpu; plain[i].size = n;
        *p = plain[i].at = (addr)mmap(0, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0); return 0;
    }
    return INVALID;
}
int cuMemFree_v2(addr p) {
    for (int i = 0; i < MANY; i++) if (plain[i].live && plain[i].at == p) {
        if (current() != plain[i].gpu) return NOCONTEXT;
        plain[i].live = 0; used[plain[i].gpu] -= plain[i].size; munmap((void *)p, plain[i].size); return 0;
    }
    return INVALID;
}
int cuMemcpy(addr to, addr from, size_t n) {
    if (current() < 0) return NOCONTEXT;
    memcpy((void *)to, (void *)from, n); return 0;
}
int cuMemGetAllocationGranularity(size_t *n, const prop *p, int option) {
    if (p->type != 1 || p->location.type != 1 || option > 1) return INVALID;
    *n = 2ul << 20; return 0;
}
int cuMemAddressReserve(addr *p, size_t n, size_t align, addr fixed, uint64_t flags) {
    if (fixed || flags || n % (2ul << 20)) return INVALID;
    char *raw = mmap(0, n + align, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    *p = align ? ((addr)raw + align - 1) / align * align : (addr)raw; ranges++; return 0;
}
int cuMemAddressFree(addr p, size_t n) {
    for (int i = 0; i < MANY; i++) if (maps[i].live && maps[i].at >= p && maps[i].at < p + n) return INVALID;
    ranges--; return munmap((void *)p, n);
}
int cuMemCreate(uint64_t *h, size_t n, const prop *p, uint64_t flags) {
    if (p->type != 1 || p->location.type != 1 || p->location.id >= GPUS || p->win32 || flags) return INVALID;
    if (n % (2ul << 20)) return INVALID;
    if (take(p->location.id, n)) return NOMEM;
    for (int i = 1; i < MANY; i++) if (!objects[i].live) {
        objects[i].live = 1; objects[i].gpu = p->location.id; objects[i].size = n; objects[i].mapped = 0;
        objects[i].fd = memfd_create("object", 0); *h = i; return ftruncate(objects[i].fd, n);
    }
    return INVALID;
}
int cuMemRelease(uint64_t h) {
    if (h >= MANY || !objects[h].live || objects[h].mapped) return INVALID;
    objects[h].live = 0; used[objects[h].gpu] -= objects[h].size; close(objects[h].fd); return 0;
}
int cuMemMap(addr p, size_t n, size_t offset, uint64_t h, uint64_t flags) {
    if (h >= MANY || !objects[h].live || objects[h].size != n || offset || flags) return INVALID;
    for (int i = 0; i < MANY; i++) if (!maps[i].live) {
        maps[i].live = 1; maps[i].at = p; maps[i].size = n; maps[i].object = h; objects[h].mapped++;
        mmap((void *)p, n, PROT_NONE, MAP_SHARED | MAP_FIXED, objects[h].fd, 0); return 0;
    }
    return INVALID;
}
int cuMemUnmap(addr p, size_t n) {
    for (int i = 0; i < MANY; i++) if (maps[i].live && maps[i].at == p && maps[i].size == n) {
        maps[i].live = 0; objects[maps[i].object].mapped--;
        mmap((void *)p, n, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0); return 0;
    }
    return INVALID;
}
int cuMemSetAccess(addr p, size_t n, const access_of *who, size_t count) {
    for (size_t i = 0; i < count; i++)
        if (who[i].location.type != 1 || who[i].location.id >= GPUS || who[i].flags != 3) return INVALID;
    return count ? mprotect((void *)p, n, PROT_READ | PROT_WRITE) : INVALID;
}
int cuPointerGetAttribute(void *out, int which, addr p) {
    int gpu = -1;
    for (int i = 0; i < MANY; i++) {
        if (plain[i].live && p >= plain[i].at && p < plain[i].at + plain[i].size) gpu = plain[i].gpu;
        if (maps[i].live && p >= maps[i].at && p < maps[i].at + maps[i].size) gpu = objects[maps[i].object].gpu;
    }
    if (gpu < 0) return INVALID;
    if (which != 2 && which != 8 && which != 9) return INVALID;
    *(int *)out = which == 2 ? 2 : which == 8 ? 0 : gpu; return 0;
}
int cuIpcGetMemHandle(ipc *h, addr p) { memset(h, 0, 64); memcpy(h, &p, 8); return 0; }
int cuIpcOpenMemHandle_v2(addr *p, ipc h, unsigned flags) {
    if (flags != 1) return INVALID;
    memcpy(p, &h, 8); return 0;
}
int cuIpcCloseMemHandle(addr p) { return p ? 0 : INVALID; }
int cuGetErrorName(int code, const char **s) {
    *s = code == NOMEM ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_INVALID_VALUE"; return 0;
}
int stub_depth(void) { return depth; }
int stub_ranges(void) { return ranges; }
size_t stub_used(int gpu) { return used[gpu]; }
"""


def build(folder: Path) -> Path:
    """The compiled library; skips the test where there is no C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler to build the emulated CUDA driver with")
    source, library = folder / "cuda.c", folder / "libcuda_stub.so"
    source.write_text(CODE)
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(source)], check=True)
    return library
