// SPDX-License-Identifier: Apache-2.0

package store

import (
	"errors"
	"fmt"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// VerificationCache vouches for a finding: with these inputs, and the kernel's rules as they
// were at this moment, all rules were right, and they were what this entry wants.
// Whoever meets the same again need not look. The zero Seal vouches for nothing.
type VerificationCache struct {
	Inputs     string // a Reading.Digest
	Entry      string // a Fingerprint
	Generation string // of the kernel; without white space
}

// sealSize is more than any seal has, in bytes.
const sealSize = 256

func sealName(src policy.SourceID) string {
	return strings.TrimSuffix(nameOf(src), documentSuffix) + sealSuffix
}

// Digest returns a hash of all that was read, and of what else a finding
// depended on: "" where something was read that cannot be believed, for which
// nobody should vouch.
func (r *Reading) Digest(others ...string) string {
	parts := make([]string, 0, 2*len(r.documents)+2+len(others))
	for _, f := range r.documents {
		if f.err != nil {
			return ""
		}
		parts = append(parts, f.name, string(f.data))
	}
	parts = append(parts, "") // no document has that name
	switch {
	case r.record == nil:
		parts = append(parts, "")
	case r.record.err != nil:
		return ""
	default:
		parts = append(parts, string(r.record.data)) // an empty one is damaged, and sealed by nobody
	}
	return hashName("seal", append(parts, others...)...)
}

// Fingerprint returns a hash of texts. No two lists of texts have the same.
func Fingerprint(texts ...string) string { return hashName("entry", texts...) }

// VerificationCache returns the seal of the source that Read was asked for. One that cannot
// be read, or believed, is the zero Seal.
func (r *Reading) VerificationCache() VerificationCache { return r.seal }

func (f *folder) seal(src policy.SourceID) VerificationCache {
	fd, _, err := f.open("read seal", sealName(src), unix.O_RDONLY)
	if err != nil {
		return VerificationCache{}
	}
	defer func() { _ = unix.Close(fd) }()
	data, err := readAll(fd, sealSize)
	line, whole := strings.CutSuffix(string(data), "\n")
	fields := strings.Fields(line)
	if err != nil || !whole || len(fields) != 3 {
		return VerificationCache{}
	}
	return VerificationCache{fields[0], fields[1], fields[2]}
}

// VerificationCache reads the seal of a source alone.
func (d *Dir) VerificationCache(src policy.SourceID) VerificationCache {
	sources, err := d.descend(false, sourcesDir)
	if err != nil {
		return VerificationCache{}
	}
	defer sources.close()
	return sources.seal(src)
}

// PutVerificationCache writes the seal of a source, beside its document. It takes no lock and
// syncs nothing, and writes in place: of a seal that is torn, or lost with the
// power, nothing follows but another look.
func (d *Dir) PutVerificationCache(src policy.SourceID, s VerificationCache) error {
	const op = "write seal"
	sources, err := d.descend(false, sourcesDir)
	if err != nil {
		return err
	}
	defer sources.close()
	name := sealName(src)
	fd, _, err := sources.open(op, name, unix.O_WRONLY)
	if err != nil { // there is none, or one that nobody believes
		if err = sources.remove(name); err == nil {
			fd, err = sources.create(op, name)
		}
	}
	if err != nil {
		return err
	}
	// Not O_TRUNC: one who reads meanwhile should see a seal, this one or the last.
	text := fmt.Appendf(nil, "%s %s %s\n", s.Inputs, s.Entry, s.Generation)
	n, err := unix.Pwrite(fd, text, 0)
	if err == nil {
		err = unix.Ftruncate(fd, int64(n)) // half a seal vouches for nothing
	}
	if err = errors.Join(err, unix.Close(fd)); err != nil {
		return failure(op, sources.in(name), err)
	}
	return nil
}
