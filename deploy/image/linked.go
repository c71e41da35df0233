// SPDX-License-Identifier: Apache-2.0

package main

import (
	"debug/elf"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// The programs to which all names of iptables link, by variant.
const (
	nftProgram    = "xtables-nft-multi"
	legacyProgram = "xtables-legacy-multi"
)

// linked returns the files below a root directory with everything that the dynamic linker loads for
// them, including the linker, under the names that it looks up. A missing library is an error.
func linked(root string, names []string) ([]string, error) {
	found := map[string]bool{}
	for len(names) > 0 {
		name := names[0]
		names = names[1:]
		if found[name] {
			continue
		}
		found[name] = true
		needs, err := needs(filepath.Join(root, name))
		if err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		for _, library := range needs {
			at, err := locate(root, library)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", name, err)
			}
			names = append(names, at)
		}
	}
	return slices.Sorted(maps.Keys(found)), nil
}

// needs returns the libraries of an ELF file, and its linker by its path.
func needs(path string) ([]string, error) {
	f, err := elf.Open(path)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }() // only read
	libraries, err := f.ImportedLibraries()
	if err != nil {
		return nil, err
	}
	for _, p := range f.Progs {
		if p.Type != elf.PT_INTERP {
			continue
		}
		text := make([]byte, p.Filesz)
		if _, err := p.ReadAt(text, 0); err != nil {
			return nil, err
		}
		libraries = append(libraries, strings.TrimRight(string(text), "\x00"))
	}
	return libraries, nil
}

// locate finds a library as the linker does without a cache (ld.so(8)): in Debian's directories of
// the architecture first.
func locate(root, library string) (string, error) {
	if filepath.IsAbs(library) {
		name := strings.TrimPrefix(library, "/")
		_, err := os.Stat(filepath.Join(root, name))
		return name, err
	}
	for _, dir := range []string{"lib/*-linux-gnu", "usr/lib/*-linux-gnu", "lib", "usr/lib"} {
		matches, err := filepath.Glob(filepath.Join(root, dir, library))
		if err != nil {
			return "", err
		}
		if len(matches) == 1 {
			return filepath.Rel(root, matches[0])
		}
	}
	return "", fmt.Errorf("library %s is in none of the packages; add the one that has it to the list", library)
}
