// SPDX-License-Identifier: Apache-2.0

package store

import (
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

const (
	entriesSuffix = ".entries"
	maxEntries    = 16 // of one network
)

func entriesName(network string) string { return networkName(network) + entriesSuffix }

// HadEntry reports whether the network's conflist had an entry with these statements in this boot, as far as
// AddEntry was told.
func (d *Dir) HadEntry(network, statements string) bool {
	f, err := d.ofBoot(false)
	if err != nil {
		return false
	}
	defer f.close()
	return slices.Contains(f.entryDigests(network), Digest(statements))
}

// entryDigests returns the digests on record, the latest last.
func (f *folder) entryDigests(network string) []string {
	data, err := f.read(entriesName(network))
	if err != nil {
		return nil
	}
	return decodeDigests(data)
}

// decodeDigests decodes a file that was written whole, and returns nothing for any other.
func decodeDigests(data []byte) []string {
	text, whole := strings.CutSuffix(string(data), "\n")
	if !whole {
		return nil
	}
	return strings.Split(strings.TrimRight(text, "\n"), "\n") // see overwrite
}

// AddEntry records that the network's conflist has an entry with these statements, and forgets the oldest of
// more than 16. It takes no lock: of two concurrent calls one may be lost, whose entry is recorded when it is
// read again.
func (d *Dir) AddEntry(network, statements string) error {
	const op = "write the digests of plugin entries"
	f, err := d.ofBoot(true)
	if err != nil {
		return err
	}
	defer f.close()
	before := f.entryDigests(network)
	digest := Digest(statements)
	if len(before) > 0 && before[len(before)-1] == digest {
		return nil
	}
	var all []string
	for _, d := range before {
		if d != digest {
			all = append(all, d)
		}
	}
	all = append(all, digest)
	file, err := f.openOrCreate(op, entriesName(network), unix.O_WRONLY)
	if err != nil {
		return err
	}
	text := strings.Join(all[max(0, len(all)-maxEntries):], "\n") + "\n"
	return failure(op, f.in(entriesName(network)), overwrite(file, []byte(text)))
}
