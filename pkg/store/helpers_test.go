// SPDX-License-Identifier: Apache-2.0

package store_test

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/policytest"
	"github.com/ip-masq/ip-masq-cni/e2e/timelimit"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// The ids of two boots.
const (
	boot    = "5e0c2c8e-0000-4000-8000-000000000001"
	another = "5e0c2c8e-0000-4000-8000-000000000002"
)

// open returns a dataDir that does not exist yet.
func open(t *testing.T) *store.Dir {
	t.Helper()
	return store.Open(filepath.Join(t.TempDir(), "state")).WithBoot(boot)
}

func lock(t *testing.T, d *store.Dir) *store.Lock {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), timelimit.Wait)
	defer cancel()
	l := assert.Must(d.Lock(ctx))(t)
	t.Cleanup(func() { ok(t, l.Release()) })
	return l
}

var ok = assert.NoError

func aPod(network, container, ifname string) store.Pod {
	return store.Pod{Attachment: store.Attachment{Network: network, ContainerID: container, IfName: ifname}}
}

// fails holds an error to all the texts it must have.
var fails = assert.ErrorContains

func store1(t testing.TB, l *store.Lock, c policy.Source) {
	t.Helper()
	ok(t, l.Put(c))
}

func drop(l *store.Lock, src policy.SourceID) error {
	if err := l.Drop(src); err != nil {
		return err
	}
	return l.CommitDrop(src)
}

func load(t testing.TB, d *store.Dir) store.State {
	t.Helper()
	return assert.Must(d.Load())(t)
}

// loads holds what is loaded to be sound and just that.
func loads(t *testing.T, d *store.Dir, want ...policy.Source) {
	t.Helper()
	s := load(t, d)
	if len(s.Unreadable) > 0 {
		t.Errorf("unreadable: %v", s.Unreadable)
	}
	same(t, s.Sources, want)
}

func same[T any](t testing.TB, got, want T) {
	t.Helper()
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got, want:\n%s", cmp.Diff(fmt.Sprintf("%+v", got), fmt.Sprintf("%+v", want)))
	}
}

func network(name string) policy.SourceID { return policy.SourceID{Kind: policy.Network, Name: name} }

func newSource(name string, cidrs ...string) policy.Source {
	c := policy.Source{ID: network(name), Policy: policy.SourcePolicy{Chain: policy.DefaultChain}, Order: 1}
	for _, s := range cidrs {
		c.Policy.NonMasqueradeCIDRs = append(c.Policy.NonMasqueradeCIDRs, netip.MustParsePrefix(s))
	}
	return c
}

// full is a source that states every key.
func full(t testing.TB, name string) policy.Source {
	return policy.Source{
		ID: network(name), Order: 7, Superseded: true,
		PodSubnets: []netip.Prefix{netip.MustParsePrefix("10.1.2.0/24"), netip.MustParsePrefix("fd00:1::/64")},
		Policy:     policytest.Stating(t, strings.Join(policytest.Every(t, `"`, ":"), ",")),
	}
}

// sourceFiles returns what lies beside the documents, by path.
func sourceFiles(t testing.TB, d *store.Dir) []string {
	t.Helper()
	return assert.Must(filepath.Glob(d.Path() + "/sources/*"))(t)
}

// document stores a source and returns its file.
func document(t *testing.T, d *store.Dir, c policy.Source) string {
	t.Helper()
	before := sourceFiles(t, d)
	ctx, cancel := context.WithTimeout(t.Context(), timelimit.Wait)
	defer cancel()
	l := assert.Must(d.Lock(ctx))(t)
	store1(t, l, c)
	ok(t, l.Release())
	for _, f := range sourceFiles(t, d) {
		if !slices.Contains(before, f) {
			return f
		}
	}
	t.Fatal("no new document")
	return ""
}

// tree lists the paths below a directory with their modes.
func tree(t testing.TB, root string) map[string]os.FileMode {
	t.Helper()
	out := map[string]os.FileMode{}
	err := filepath.Walk(root, func(path string, info os.FileInfo, err error) error {
		if err == nil {
			out[strings.TrimPrefix(path, root)] = info.Mode()
		}
		return err
	})
	if err != nil && !os.IsNotExist(err) {
		t.Fatal(err)
	}
	return out
}

func absent(t *testing.T, path string) {
	t.Helper()
	if _, err := os.Lstat(path); !os.IsNotExist(err) {
		t.Errorf("%s is there (%v)", path, err)
	}
}
