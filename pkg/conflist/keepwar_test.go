// SPDX-License-Identifier: Apache-2.0

package conflist

import (
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

// fight lets an entry live for each of these times in turn, put back as soon as
// that is allowed, and returns the delays.
func fight(w *war, now *time.Time, lives ...time.Duration) []time.Duration {
	var delays []time.Duration
	for _, lived := range lives {
		w.there(*now)
		*now = now.Add(lived)
		w.missing(*now)
		delays = append(delays, w.delay())
		*now = w.due()
	}
	return delays
}

func times(n int, d time.Duration) []time.Duration {
	all := make([]time.Duration, n)
	for i := range all {
		all[i] = d
	}
	return all
}

func TestWarDelays(t *testing.T) {
	var w war
	now := time.Now()
	delays := fight(&w, &now, times(70, 50*time.Millisecond)...)
	for i, d := range delays[:60] {
		if i < 9 && d != 0 || i > 0 && d < delays[i-1] || d >= 500*time.Millisecond {
			t.Errorf("removal %d: %s", i+1, d)
		}
	}
	want := []time.Duration{1, 2, 4, 8, 16, 32, 60, 60, 60, 60}
	for i := range want {
		want[i] *= time.Second
	}
	if diff := cmp.Diff(want, delays[60:]); diff != "" {
		t.Error(diff)
	}
	// It is forgotten once the entry has lived for a while.
	w.there(now)
	if w.there(now.Add(9*time.Second)) || !w.on {
		t.Error("over too early")
	}
	if !w.there(now.Add(10*time.Second)) || w.on || w.delay() != 0 {
		t.Error("not over")
	}
	now = now.Add(time.Minute)
	if delays := fight(&w, &now, times(9, 0)...); delays[8] != 0 || w.on {
		t.Error("it is remembered", delays)
	}
}

func TestWarIsRecognised(t *testing.T) {
	const second = time.Second
	for _, c := range []struct {
		name  string
		lives []time.Duration
		on    bool
		peace time.Duration
	}{
		{name: "nine at once", lives: times(9, 0)},
		{name: "ten at once", lives: times(10, 0), on: true, peace: 10 * second},
		{name: "ten at once after a day of quiet", lives: append([]time.Duration{24 * time.Hour}, times(10, 0)...), on: true, peace: 10 * second},
		{name: "ten at once, a minute apart from an earlier one", lives: append([]time.Duration{0, time.Minute}, times(10, 0)...), on: true, peace: 10 * second},
		{name: "five over a minute after a day", lives: append([]time.Duration{24 * time.Hour}, times(4, 15*second)...), on: true, peace: 30 * second},
		{name: "five, one of them after eight minutes", lives: append(times(4, 0), 8*time.Minute), on: true, peace: 5 * time.Minute},
		{name: "nine, and one that stayed", lives: append(times(9, 0), time.Minute, 0)[:10], on: true, peace: 2 * time.Minute},
		{name: "four a minute apart", lives: times(4, time.Minute)},
		{name: "five a minute apart", lives: times(5, time.Minute), on: true, peace: 2 * time.Minute},
		{name: "five within a minute", lives: times(5, 14*second)},
		{name: "each ten seconds", lives: times(7, 10*second), on: true, peace: 20 * second},
		{name: "each three minutes", lives: times(20, 3*time.Minute)},
		{name: "each two minutes", lives: times(20, 2*time.Minute), on: true, peace: 4 * time.Minute},
	} {
		t.Run(c.name, func(t *testing.T) {
			var w war
			now := time.Now()
			delays := fight(&w, &now, c.lives...)
			if w.on != c.on {
				t.Errorf("on is %t, delays %v", w.on, delays)
			}
			if w.on {
				if w.there(now); w.peaceAt().Sub(now) != c.peace {
					t.Error("peace after", w.peaceAt().Sub(now))
				}
			}
			for i, d := range delays {
				if d > 0 && c.lives[i] >= brief {
					t.Error("to wait gains nothing here:", d)
				}
			}
		})
	}
}

// TestWarIsBounded: whatever happens, what is remembered is little, and repairs
// wait for a minute at most.
func TestWarIsBounded(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var w war
		now := time.Now()
		for range rapid.IntRange(0, 500).Draw(t, "steps") {
			now = now.Add(time.Duration(rapid.SampledFrom([]int{0, 1, 100, 6000, 60000}).Draw(t, "ms")) * time.Millisecond)
			if rapid.Bool().Draw(t, "there") {
				w.there(now)
			} else {
				w.missing(now)
			}
			if w.delay() > longestPause || len(w.removals) > 2*mostBrief+1 || w.on && len(w.removals) == 0 {
				t.Fatalf("%+v", w)
			}
		}
		w.there(now)
		if w.there(now.Add(longestPeace)); w.on {
			t.Fatal("it goes on for ever")
		}
	})
}

func TestSuspects(t *testing.T) {
	for _, c := range []struct{ file, doc, who, remedy string }{
		{"05-cilium.conflist", listNamed("cilium"), "Cilium", "cni.exclusive=false"},
		{"10-x.conflist", `{"name":"x","cniVersion":"1.0.0","plugins":[{"type":"cilium-cni"}]}`, "Cilium", "cni.exclusive=false"},
		{"10-kindnet.conflist", listNamed("kindnet"), "kindnet", "compiled in"},
		{"10-calico.conflist", listNamed("k8s-pod-network"), "Calico", "cni_network_config"},
		{"10-flannel.conflist", `{"name":"cbr0","cniVersion":"1.0.0","plugins":[{"type":"flannel"}]}`, "flannel", "kube-flannel-cfg"},
		{"10-bridge.conflist", listNamed("bridge"), "main CNI plugin", "write our entry too"},
		{"10-broken.conflist", "{", "main CNI plugin", "write our entry too"},
	} {
		dir := dirWith(t, map[string]string{c.file: c.doc})
		single := strings.HasSuffix(c.file, ".conf")
		n := Network{Path: dir + "/" + c.file, Doc: []byte(c.doc), Single: single, Name: "x"}
		if p := suspect(n); !strings.Contains(p.name, c.who) || !strings.Contains(p.remedy, c.remedy) {
			t.Errorf("%s: %+v", c.file, p)
		}
	}
	dir := dirWith(t, map[string]string{"10-bridge.conflist": listNamed("bridge"), "20-y.conflist.cilium_bak": ""})
	if p := suspect(Network{Path: dir + "/10-bridge.conflist"}); p.name != "Cilium" {
		t.Error(p)
	}
}

// TestKeeperFiftyRewrites: the main CNI plugin rewrites its file as soon as
// the entry is there.
func TestKeeperFiftyRewrites(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := keep(t, nil)
		k.write(aList, listNamed("a"))
		k.after(time.Second)
		for i := range 50 {
			k.write(aList, listNamed("a"))
			start := time.Now()
			for !k.present(aList) {
				k.after(time.Millisecond)
			}
			if took := time.Since(start); took > 500*time.Millisecond {
				t.Errorf("rewrite %d: back after %s", i+1, took)
			}
		}
		if k.writes != 51 {
			t.Errorf("%d writes for 50 rewrites and the first", k.writes)
		}
		if !k.last.Flapping {
			t.Error("50 in a row are nothing to report")
		}
		k.logged(1, "put our entry into the conflist")
		k.logged(1, "put our entry back")
		k.logged(1, "level=ERROR")
		k.after(11 * time.Second)
		if k.says(); k.last.Flapping {
			t.Error("it is not over")
		}
		k.logged(1, "our entry stays in the conflist again")
	})
}

// TestKeeperPeaceAfterALongLife: how long the entry lived in peace says nothing
// about the war that follows.
func TestKeeperPeaceAfterALongLife(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := keep(t, nil)
		k.write(aList, listNamed("a"))
		k.after(24 * time.Hour)
		for range 12 {
			k.write(aList, listNamed("a"))
			for !k.present(aList) {
				k.after(time.Millisecond)
			}
		}
		k.after(time.Second)
		if k.says("again and again"); !k.last.Flapping {
			t.Error("12 in a row are nothing to report")
		}
		k.after(10 * time.Second)
		if k.says(); k.last.Flapping {
			t.Error("it is not over")
		}
	})
}

func TestKeeperRival(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var active atomic.Bool
		k := keep(t, func(k *kept) {
			k.wrote = func() {
				if active.Load() {
					time.AfterFunc(time.Millisecond, func() { k.write("net.d/10-kindnet.conflist", listNamed("kindnet")) })
				}
			}
		})
		active.Store(true)
		k.write("net.d/10-kindnet.conflist", listNamed("kindnet"))
		k.after(2 * time.Second)
		k.says("kindnet.conflist*again and again*kindnet*put back at once*compiled in")
		if !k.last.Flapping {
			t.Error(k.last)
		}
		k.after(time.Minute)
		before := k.writes
		k.after(10 * time.Minute)
		if n := k.writes - before; n > 12 || n < 9 {
			t.Errorf("%d writes in ten minutes", n)
		}
		if k.says("*stays away for 1m0s now"); k.last.Present {
			t.Error("it is not there while it is waited")
		}
		k.logged(1, "level=ERROR")
		active.Store(false)
		k.after(75 * time.Second)
		if k.says(); k.last.Flapping || !k.last.Present {
			t.Error("it is not over")
		}
		if n := strings.Count(k.log, "\n"); n > 5 {
			t.Errorf("%d lines of log", n)
		}
		k.write("net.d/10-kindnet.conflist", listNamed("kindnet"))
		k.after(60 * time.Millisecond)
		if !k.last.Present {
			t.Error("the next one is not repaired at once")
		}
	})
}

func TestKeeperSlowRewriter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := keep(t, nil)
		for i := range 100 {
			k.write(aList, listNamed("a"))
			if k.after(60 * time.Millisecond); !k.last.Present {
				t.Fatalf("rewrite %d is not repaired at once", i)
			}
			k.after(30 * time.Second)
		}
		k.says("again and again*put back at once")
		k.logged(1, "level=ERROR")
		k.after(time.Minute)
		k.says()
	})
}
