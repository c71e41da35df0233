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
	ends := f.ends()
	hasEnded := !ends.IsZero() && now.After(ends)
	if hasEnded {
		f.removals, f.rewrites = nil, nil
	}
	isPresent := n.Entries > 0
	if f.present && !isPresent {
		f.removals = appendLast(f.removals, now, maxRemovals)
	}
	textBefore, infoBefore := f.text, f.info
	f.remember(n.Path, n.Conflist.Doc, isPresent)
	isOtherText := infoBefore != nil && f.text != textBefore
	if isOtherText {
		f.changed = now
	}
	isRewritten := isOtherFile(infoBefore, f.info)
	if isPresent && isRewritten && f.isContested(now) {
		f.rewrites = appendLast(f.rewrites, now, maxRewrites)
	}
}

// isOtherFile reports whether a file was replaced or written between two looks that both found one.
func isOtherFile(before, after os.FileInfo) bool {
	if before == nil || after == nil {
		return false
	}
	isReplaced := !os.SameFile(before, after)
	isWritten := !before.ModTime().Equal(after.ModTime())
	return isReplaced || isWritten
}

// isContested reports whether a write of the file may be part of a fight. A program that writes the same text
// once a second fights with nobody, so the text must have changed lately, or the file must still be written.
// The text need not have changed at this look: a look between two programs that fight often meets the text of
// the same one again.
func (f *flapping) isContested(now time.Time) bool {
	hasChangedLately := now.Sub(f.changed) < minStay
	age := now.Sub(f.info.ModTime())
	isBeingWritten := age >= 0 && age < quietFile
	return hasChangedLately || isBeingWritten
}

// remember notes a text that ip-masq found in the file, or wrote.
func (f *flapping) remember(path string, text []byte, present bool) {
	f.present = present
	f.text = config.DigestOf(text)
	f.info = nil
	info, err := os.Stat(path)
	if err == nil {
		f.info = info
	}
}

// ends returns when the flapping ends, or ended, if nothing happens any more; zero if there was none.
func (f *flapping) ends() time.Time {
	removals := endOf(f.removals, maxRemovals)
	rewrites := endOf(f.rewrites, maxRewrites)
	if rewrites.After(removals) {
		return rewrites
	}
	return removals
}

func (f *flapping) isActive(now time.Time) bool { return !now.After(f.ends()) }

// isFight reports whether the file is written repeatedly and the entry is not removed repeatedly.
func (f *flapping) isFight() bool { return endOf(f.removals, maxRemovals).IsZero() }

// endOf returns when events stop to count as flapping, zero if they are too few or took too long.
func endOf(events []time.Time, enough int) time.Time {
	if len(events) < enough {
		return time.Time{}
	}
	first, last := events[0], events[len(events)-1]
	took := last.Sub(first)
	if took > flappingWindow {
		return time.Time{}
	}
	return last.Add(max(took, minStay))
}

// appendLast appends a time, and keeps the last so many.
func appendLast(times []time.Time, t time.Time, most int) []time.Time {
	times = append(times, t)
	return times[max(0, len(times)-most):]
}
