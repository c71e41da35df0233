// SPDX-License-Identifier: Apache-2.0

package conflist

import (
	"os"
	"time"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
)

const (
	// Other programs flap if they remove the entry maxRemovals times, or write the file maxRewrites times,
	// within flappingWindow. It lasts until the file has stayed as it is for as long as they took, and for
	// minStay.
	maxRemovals    = 5
	maxRewrites    = 20
	flappingWindow = 10 * time.Minute
	minStay        = 10 * time.Second

	// quietFile is how long the loop waits for a file that is being written, before it syncs the conflist.
	quietFile = 100 * time.Millisecond
)

// flapping detects that another program removes the plugin entry repeatedly, and that other programs fight
// about the file, which concerns pods even where the entry is there at each look.
type flapping struct {
	present bool        // the entry was there at the last look, or was inserted since
	text    string      // the digest of the file's text at that time
	info    os.FileInfo // of the file at that time; nil if there was none
	changed time.Time   // when a look found another text last

	removals []time.Time // of the entry, the last maxRemovals
	rewrites []time.Time // of the file, the last maxRewrites
}

// look notes the file of the network as it is now; the network without a path is one that is gone.
func (f *flapping) look(n Network, now time.Time) {
	if ends := f.ends(); !ends.IsZero() && now.After(ends) {
		f.removals, f.rewrites = nil, nil
	}
	isPresent := n.Entries > 0
	if f.present && !isPresent {
		f.removals = appendLast(f.removals, now, maxRemovals)
	}
	before := *f
	f.remember(n.Path, n.Conflist.Doc, isPresent)
	if before.info != nil && f.text != before.text {
		f.changed = now
	}
	if isPresent && f.isRewritten(before, now) {
		f.rewrites = appendLast(f.rewrites, now, maxRewrites)
	}
}

// isRewritten reports whether the file is another one than before in a way that counts: soon after its
// text changed, as a look between two programs that fight often meets the text of the same one again, or
// while it is still being written. A program that writes the same text once a second fights with nobody.
func (f *flapping) isRewritten(before flapping, now time.Time) bool {
	if f.info == nil || before.info == nil {
		return false
	}
	isSame := os.SameFile(f.info, before.info) && f.info.ModTime().Equal(before.info.ModTime())
	if isSame {
		return false
	}
	age := now.Sub(f.info.ModTime())
	isBeingWritten := age >= 0 && age < quietFile
	return now.Sub(f.changed) < minStay || isBeingWritten
}

// remember notes a text that ip-masq found in the file, or wrote.
func (f *flapping) remember(path string, text []byte, present bool) {
	f.present, f.text, f.info = present, config.DigestOf(text), nil
	if info, err := os.Stat(path); err == nil {
		f.info = info
	}
}

// ends returns when the flapping ends, or ended, if nothing happens any more; zero if there was none.
func (f *flapping) ends() time.Time {
	removals, rewrites := endOf(f.removals, maxRemovals), endOf(f.rewrites, maxRewrites)
	if rewrites.After(removals) {
		return rewrites
	}
	return removals
}

func (f *flapping) isActive(now time.Time) bool { return !now.After(f.ends()) }

// isFight reports whether the file is written repeatedly and the entry is not removed repeatedly.
func (f *flapping) isFight() bool { return endOf(f.removals, maxRemovals).IsZero() }

func endOf(times []time.Time, enough int) time.Time {
	if len(times) < enough {
		return time.Time{}
	}
	last := times[len(times)-1]
	took := last.Sub(times[0])
	if took > flappingWindow {
		return time.Time{}
	}
	return last.Add(max(took, minStay))
}

// appendLast appends a time, and keeps the last so many.
func appendLast(times []time.Time, t time.Time, most int) []time.Time {
	return append(times[max(0, len(times)-most+1):], t)
}
