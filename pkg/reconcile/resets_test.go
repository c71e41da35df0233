// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// TestFailedResetIsRetried: a reset that fails is counted, logged once for each error, fails no sync, and is
// tried again.
func TestFailedResetIsRetried(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t)
		f.Settings.CNIBinDir = f.dir
		f.file(filepath.Join(f.dir, "ip-masq"), "#!/bin/sh\n")
		must(t, os.Chmod(filepath.Join(f.dir, "ip-masq"), 0o755))
		f.conflist("podnet", map[string]any{"guard": "drop", "podCIDRs": []string{"10.88.0.0/16"}})
		walks := 0
		chain := policy.ChainFamily{Chain: "IP-MASQ-AGENT", Family: policy.IPv4}
		f.Conntrack = func(context.Context, *policy.ConnectionJudge) (map[policy.ChainFamily]uint64, error) {
			switch walks++; walks {
			case 1, 2:
				return nil, errors.New("no walk today")
			case 3:
				return nil, errors.New("no walk tomorrow")
			}
			return map[policy.ChainFamily]uint64{chain: 7}, nil
		}
		var log bytes.Buffer
		var mu sync.Mutex
		reports, deleted, failed := 0, uint64(0), 0
		l := NewLoop(f.Node, slog.New(slog.NewTextHandler(&log, nil)), func(r *Report) {
			mu.Lock()
			defer mu.Unlock()
			if reports++; !r.Ready() {
				t.Errorf("not ready: %v", problems(r))
			}
		})
		l.ConnectionsReset = func(n map[policy.ChainFamily]uint64, err error) {
			mu.Lock()
			defer mu.Unlock()
			if deleted += n[chain]; err != nil {
				failed++
			}
		}
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		var running sync.WaitGroup
		running.Go(func() { l.Run(ctx) })
		for ctx.Err() == nil {
			if s, err := f.Dir.Load(); err == nil && len(s.Sources) > 0 && len(s.Record.Resets) == 0 {
				break
			}
			if lock, err := f.Dir.Lock(ctx); err == nil { // the next try is due at once
				if s, err := f.Dir.Load(); err == nil && s.Record.LastReset > 1 && len(s.Record.Resets) > 0 {
					s.Record.LastReset = 1
					err = lock.PutRecord(s.Record)
					if err != nil {
						t.Error(err)
					}
				}
				assert.NoError(t, lock.Release())
			}
			time.Sleep(10 * time.Millisecond)
		}
		if ctx.Err() != nil {
			t.Error("the reset stays on record")
		}
		time.Sleep(10 * time.Millisecond)
		cancel()
		running.Wait()
		if text := log.String(); deleted != 7 || failed != 3 || reports == 0 || strings.Count(text, "failed to reset connections") != 2 ||
			!strings.Contains(text, `msg="reset connections" count=7 chain=IP-MASQ-AGENT`) {
			t.Errorf("%d deleted, %d failed, %d reports:\n%s", deleted, failed, reports, text)
		}
	})
}

// TestPublicationAfterAReset: nothing is verified while a reset is on record, and what a sync found is
// published when its walk has ended.
func TestPublicationAfterAReset(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t)
		f.Version = "test"
		f.conflist("podnet", map[string]any{"staleConnections": "reset", "podCIDRs": []string{"10.88.0.0/16"}})
		walks, end := make(chan struct{}, 9), make(chan struct{})
		f.Conntrack = func(context.Context, *policy.ConnectionJudge) (map[policy.ChainFamily]uint64, error) {
			walks <- struct{}{}
			<-end
			return nil, nil
		}
		r := f.run(func(l *Loop) { l.Verified = f.Publish })
		<-walks                                           // after the first write
		r.Committed(Commit{Generation: 7, Touched: true}) // which is that of the first write
		syncs := r.count()
		r.until("sync", func(all []*Report) bool { return len(all) > syncs })
		close(end)
		r.until("publication", func([]*Report) bool { return strings.HasSuffix(f.Dir.Published().Generation, ".7") })
	})
}

// TestResetsBesideAFault: a fault that leaves the rules right holds up no reset, and no publication.
func TestResetsBesideAFault(t *testing.T) {
	for name, breaks := range map[string]func(*fixture){
		"a directory of conflists that is a file": func(f *fixture) {
			must(t, os.Rename(f.Settings.CNIConfDir, f.Settings.CNIConfDir+".away"))
			f.file(f.Settings.CNIConfDir, "")
		},
		"a backend that a repair could not write": func(f *fixture) {
			f.Drivers = netfilter.Drivers{&cannotWrite{f.Drivers[0]}}
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newFixture(t)
				f.Version = "test"
				walks := f.withReset()
				breaks(f)
				r := f.run(func(l *Loop) { l.Verified = f.Publish })
				r.Committed(Commit{Generation: 7, Touched: true})
				time.Sleep(30 * time.Second)
				r.until("problem", func(all []*Report) bool { return !last(all).Ready() })
				r.stop()
				s := assert.Must(f.Dir.Load())(t)
				assert.Equal(t, "walks", *walks, 1)
				assert.Equal(t, "resets on record", len(s.Record.Resets), 0)
				if at := f.Dir.Published().Generation; !strings.HasSuffix(at, ".7") {
					t.Errorf("published is %q", at)
				}
			})
		})
	}
}

// TestResetsOnAFullDisk: the operator learns that a reset that cannot be recorded is not made, and it is made
// when the disk can be written again.
func TestResetsOnAFullDisk(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t)
		disk := f.mount("mode=0700")
		walks := f.withReset()
		f.readOnly(disk)
		var mu sync.Mutex
		failed := 0
		r := f.run(func(l *Loop) {
			l.ConnectionsReset = func(_ map[policy.ChainFamily]uint64, err error) {
				mu.Lock()
				defer mu.Unlock()
				failed++
				assert.ErrorContains(t, err, "read-only")
			}
		})
		time.Sleep(30 * time.Second)
		mu.Lock()
		if failed == 0 || failed > 6 {
			t.Errorf("%d resets failed in 30 s", failed)
		}
		mu.Unlock()
		must(t, unix.Mount("", disk, "", unix.MS_REMOUNT, "mode=0700"))
		time.Sleep(2 * time.Minute)
		r.stop()
		assert.Equal(t, "walks", *walks, 1)
	})
}

// withReset syncs a policy after which a reset is on record, and returns how many walks there were since.
func (f *fixture) withReset() (walks *int) {
	f.Helper()
	f.conflist("podnet", map[string]any{"guard": "drop", "podCIDRs": []string{"10.88.0.0/16"}})
	r := f.sync()
	assert.Equal(f, "resets on record", len(r.State.Record.Resets), 1)
	walks = new(int)
	f.Conntrack = func(context.Context, *policy.ConnectionJudge) (map[policy.ChainFamily]uint64, error) {
		*walks++
		return nil, nil
	}
	return walks
}

// cannotWrite is a driver whose backend can be read only.
type cannotWrite struct{ netfilter.Driver }

func (d *cannotWrite) Open(c netfilter.Choice) (netfilter.Backend, error) {
	b, err := d.Driver.Open(c)
	return &cannotWriteBackend{b}, err
}

type cannotWriteBackend struct{ netfilter.Backend }

func (*cannotWriteBackend) CanWrite(context.Context, policy.Family) error {
	return netfilter.ErrUnusable
}

// TestResetsOfAFormerBoot: the connections ended with that boot, and a record of it that nothing replaces
// asks for no syncs.
func TestResetsOfAFormerBoot(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t)
		lock := f.lock()
		rec := store.Record{Boot: "00000000-0000-4000-8000-000000000000", Resets: []store.Reset{{At: 1}}}
		assert.NoError(t, errors.Join(lock.PutRecord(rec), lock.Release()))
		r := f.run(func(*Loop) {})
		time.Sleep(10 * time.Second)
		if n := r.count(); n > 2 {
			t.Errorf("%d syncs in 10 s", n)
		}
	})
}

// TestResetsOnAReadOnlyDisk: they are retried with backoff, also where no instance lock can be created.
func TestResetsOnAReadOnlyDisk(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t).withAgent()
		f.conflist("podnet", map[string]any{"guard": "drop", "podCIDRs": []string{"10.88.0.0/16"}})
		f.sync()
		f.agentFile("nonMasqueradeCIDRs: [192.0.2.0/24]")
		dir := f.Dir.Path()
		must(t, unix.Mount(dir, dir, "", unix.MS_BIND, ""))
		defer func() { must(t, unix.Unmount(dir, unix.MNT_DETACH)) }()
		must(t, unix.Mount("", dir, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, ""))
		r := f.run(func(*Loop) {})
		time.Sleep(10 * time.Second)
		if s, err := f.Dir.Load(); err != nil || len(s.Record.Resets) == 0 {
			t.Errorf("the resets on record are %v, %v", s.Record.Resets, err)
		}
		if n := r.count(); n > 8 {
			t.Errorf("%d syncs in 10 s", n)
		}
	})
}
