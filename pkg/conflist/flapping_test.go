// SPDX-License-Identifier: Apache-2.0

package conflist

import (
	"os"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
)

// TestFights: other programs that write the file again and again are flapping, although the entry is there each time;
// a program that writes the same text is not, unless the file is never quiet.
func TestFights(t *testing.T) {
	one := listWith("a", `{"type":"one-cni"}`, `{"type":"two-cni"}`, bareEntry)
	two := listWith("a", `{"type":"two-cni"}`, `{"type":"one-cni"}`, bareEntry)
	for name, c := range map[string]struct {
		texts  []string
		every  time.Duration
		writes int
		young  bool // the file is being written when it is read
		fights bool
	}{
		"two texts":                  {texts: []string{one, two}, every: 5 * time.Second, writes: maxRewrites, fights: true},
		"too few":                    {texts: []string{one, two}, every: 5 * time.Second, writes: maxRewrites - 1},
		"two texts, slowly":          {texts: []string{one, two}, every: time.Minute, writes: 2 * maxRewrites},
		"two texts, each met twice":  {texts: []string{one, one, two, two}, every: time.Second, writes: maxRewrites + 2, fights: true},
		"one change of the text":     {texts: slices.Concat(slices.Repeat([]string{one}, maxRewrites), []string{two}), every: time.Second, writes: maxRewrites + 10},
		"the same text":              {texts: []string{one}, every: time.Second, writes: 10 * maxRewrites},
		"the same text, never quiet": {texts: []string{one}, every: time.Second, writes: maxRewrites, young: true, fights: true},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				k := manage(t)
				k.write(aList, one)
				k.sync()
				for i := range c.writes {
					time.Sleep(c.every)
					k.write(aList, c.texts[(i+1)%len(c.texts)])
					written := time.Now().Add(-time.Second)
					if c.young {
						written = time.Now()
					}
					assert.NoError(t, os.Chtimes(k.path(aList), written, written))
					k.last = k.Sync(t.Context())
				}
				if k.last.Flapping != c.fights || !k.last.Present || k.last.Inserted > 0 {
					t.Fatalf("%+v", k.last)
				}
				if !c.fights {
					return
				}
				assert.ErrorContains(t, k.last.Problems[0].Err, "again and again", "bridge, one-cni, two-cni")
				time.Sleep(time.Until(k.last.Next))
				if k.sync(); k.last.Flapping {
					t.Errorf("it is not over: %+v", k.last)
				}
			})
		})
	}
}
