// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
)

// tree makes directories, files and links below a directory that root alone may
// write, and returns it. An entry is "NAME dir MODE", "NAME file MODE" or "NAME -> TARGET".
func tree(t *testing.T, entries ...string) string {
	t.Helper()
	// In the sandbox's /run: the temporary directory may be anywhere.
	root := filepath.Join("/run", "test", strings.ReplaceAll(t.Name(), "/", "_"))
	err := os.MkdirAll(root, 0o755)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(root) })
	modes := map[string]fs.FileMode{"755": 0o755, "777": 0o777, "775": 0o775, "1777": 0o777 | fs.ModeSticky, "644": 0o644}
	for _, entry := range entries {
		words := strings.Fields(entry)
		path, kind, arg := filepath.Join(root, words[0]), words[1], words[2]
		switch kind {
		case "dir":
			err = os.Mkdir(path, 0o755)
		case "file":
			err = os.WriteFile(path, []byte("#!/bin/sh\n"), 0o755)
		case "->":
			err = os.Symlink(strings.ReplaceAll(arg, "ROOT", root), path)
		}
		if err == nil && kind != "->" {
			err = os.Chmod(path, modes[arg])
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return root
}

func TestFind(t *testing.T) {
	for _, tc := range []struct {
		name    string
		entries []string
		path    string // ROOT is the tree
		want    string // below the tree; else what the error says
		fails   []string
	}{
		{
			name:    "plain",
			entries: []string{"a dir 755", "a/iptables-nft file 755"},
			path:    "ROOT/a", want: "a/iptables-nft",
		},
		{
			name:    "first name before first directory",
			entries: []string{"a dir 755", "b dir 755", "a/iptables file 755", "b/iptables-nft file 755"},
			path:    "ROOT/a:ROOT/b", want: "b/iptables-nft",
		},
		{
			name:    "second name",
			entries: []string{"a dir 755", "a/iptables file 755"},
			path:    "/nowhere:ROOT/a", want: "a/iptables",
		},
		{
			name: "links as in Debian's alternatives",
			entries: []string{"sbin dir 755", "alternatives dir 755",
				"sbin/xtables-nft-multi file 755", "sbin/iptables-nft -> ROOT/alternatives/iptables-nft", "alternatives/iptables-nft -> ../sbin/xtables-nft-multi"},
			path: "ROOT/sbin", want: "sbin/iptables-nft",
		},
		{
			name: "dots after a link are those of its target",
			entries: []string{"deep dir 755", "deep/bin dir 755",
				"bin -> deep/bin", "deep/prog file 755", "deep/bin/iptables-nft -> ../prog"},
			path: "ROOT/bin", want: "bin/iptables-nft",
		},
		{
			name:    "under a sticky directory of root",
			entries: []string{"t dir 1777", "t/a dir 755", "t/a/iptables-nft file 755"},
			path:    "ROOT/t/a", want: "t/a/iptables-nft",
		},
		{
			name:    "sticky is not enough for the directory itself",
			entries: []string{"t dir 1777", "t/iptables-nft file 755"},
			path:    "ROOT/t", fails: []string{"ROOT/t (writable by others)"},
		},
		{
			name:    "writable by a group",
			entries: []string{"g dir 775", "g/iptables-nft file 755"},
			path:    "ROOT/g", fails: []string{"ROOT/g (writable by others)"},
		},
		{
			name:    "below a directory that others may write",
			entries: []string{"w dir 777", "w/a dir 755", "w/a/iptables-nft file 755"},
			path:    "ROOT/w/a", fails: []string{"ROOT/w (writable by others)"},
		},
		{
			name:    "program that others may write",
			entries: []string{"a dir 755", "a/iptables-nft file 777"},
			path:    "ROOT/a", fails: []string{"ROOT/a/iptables-nft (writable by others)"},
		},
		{
			name:    "directory by way of a link that others may replace",
			entries: []string{"a dir 755", "a/iptables-nft file 755", "w dir 777", "w/bin -> ../a", "l -> w/bin"},
			path:    "ROOT/l", fails: []string{"ROOT/w (writable by others)"},
		},
		{
			name:    "link into a directory that others may write",
			entries: []string{"a dir 755", "w dir 777", "w/prog file 755", "a/iptables-nft -> ../w/prog"},
			path:    "ROOT/a", fails: []string{"ROOT/w (writable by others)"},
		},
		{
			name:    "no program",
			entries: []string{"a dir 755", "a/iptables-nft file 644", "a/iptables dir 755"},
			path:    "ROOT/a", fails: []string{"a/iptables-nft (not an executable file)", "a/iptables (not an executable file)"},
		},
		{
			name:    "links in a circle",
			entries: []string{"a dir 755", "a/iptables-nft -> iptables-nft"},
			path:    "ROOT/a", fails: []string{"too many levels of symbolic links"},
		},
		{
			name: "relative", path: "bin:.:", fails: []string{"bin/iptables (not absolute)", "passed over iptables (not absolute)"},
		},
		{
			name: "absent", path: "ROOT/none",
			fails: []string{"find iptables-nft or iptables", `in PATH "ROOT/none"`, "/usr/sbin"},
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			root := tree(t, tc.entries...)
			f := newFinder(strings.ReplaceAll(tc.path, "ROOT", root))
			got, err := f.find("iptables-nft", "iptables")
			if tc.want != "" {
				if err != nil || got != filepath.Join(root, tc.want) {
					t.Fatalf("got %q, %v; want %s", got, err, tc.want)
				}
				return
			}
			if !errors.Is(err, fs.ErrNotExist) {
				t.Fatalf("got %q, %v; want an error of absence", got, err)
			}
			for _, says := range tc.fails {
				assert.ErrorContains(t, err, strings.ReplaceAll(says, "ROOT", root))
			}
		})
	}
}

func TestFindRefusesOtherOwners(t *testing.T) {
	root := tree(t, "a dir 755", "a/iptables-nft file 755")
	f := finder{path: root + "/a", trusted: func(uint32) bool { return false }}
	_, err := f.find("iptables-nft")
	assert.ErrorContains(t, err, " / (not owned by root)")
}

func TestTrustedOwner(t *testing.T) {
	for uid, want := range map[uint32]bool{0: true, uint32(os.Geteuid()): true, 1001: false} {
		assert.Equal(t, fmt.Sprint("user ", uid), newFinder("").trusted(uid), want)
	}
}
