// SPDX-License-Identifier: Apache-2.0

package oci_test

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/ip-masq/ip-masq-cni/deploy/image/oci"
	"github.com/ip-masq/ip-masq-cni/e2e/assert"
)

const name = "example.net/some/image:v1.2.3"

func image(arch string) oci.Image {
	return oci.Image{
		Name: name, Arch: arch,
		Layers: [][]oci.File{
			{
				{Name: "usr/lib/" + arch + ".so", Mode: 0o644, Data: []byte("library")},
				{Name: "/program", Mode: 0o755, Data: []byte("program for " + arch)},
				{Name: "tmp", Mode: fs.ModeDir | 0o777},
				{Name: "lib", Mode: fs.ModeSymlink | 0o777, Link: "usr/lib"},
			},
			{
				{Name: "usr/lib/second.so", Mode: 0o644, Data: []byte("second")},
				{Name: "tmp/there", Mode: 0o600},
			},
		},
		Entrypoint: []string{"/program", "--flag"}, Cmd: []string{"run"}, Env: []string{"PATH=/bin"}, WorkingDir: "/tmp",
		Labels: map[string]string{"org.opencontainers.image.version": "v1.2.3"},
	}
}

func write(t *testing.T, images ...oci.Image) []byte {
	t.Helper()
	var out bytes.Buffer
	assert.NoError(t, oci.Write(&out, images...))
	return out.Bytes()
}

// entry is an entry of a tar, as far as tests compare it.
type entry struct {
	Type    string
	Mode    int64
	Content string
}

func unpack(t *testing.T, data []byte) (names []string, entries map[string]entry) {
	t.Helper()
	entries = map[string]entry{}
	for r := tar.NewReader(bytes.NewReader(data)); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return names, entries
		}
		assert.NoError(t, err)
		content := assert.Must(io.ReadAll(r))(t)
		if h.Uid != 0 || h.Gid != 0 || h.Uname != "" || h.Gname != "" || h.ModTime.Unix() != 0 {
			t.Errorf("%s tells of the machine that made it: %+v", h.Name, h)
		}
		names = append(names, h.Name)
		entries[h.Name] = entry{string(h.Typeflag), h.Mode, string(content) + h.Linkname}
	}
}

// layout is the content of an archive; each blob matches its digest.
type layout map[string]entry

func read(t *testing.T, archive []byte) layout {
	t.Helper()
	names, entries := unpack(t, archive)
	if len(names) != len(entries) || names[0] != "oci-layout" || entries["oci-layout"].Content != `{"imageLayoutVersion":"1.0.0"}` {
		t.Fatalf("entries %q", names)
	}
	for name, e := range entries {
		sum := sha256.Sum256([]byte(e.Content))
		if hash, is := strings.CutPrefix(name, "blobs/sha256/"); is && hash != "" && hash != hex.EncodeToString(sum[:]) {
			t.Errorf("%s has another digest", name)
		}
	}
	return entries
}

// blob returns the blob of a descriptor.
func (l layout) blob(t *testing.T, d v1.Descriptor) []byte {
	t.Helper()
	e, found := l["blobs/"+strings.Replace(string(d.Digest), ":", "/", 1)]
	if !found || int64(len(e.Content)) != d.Size {
		t.Fatalf("%+v: there %v, %d bytes", d, found, len(e.Content))
	}
	return []byte(e.Content)
}

func decode[T any](t *testing.T, data []byte) (v T) {
	t.Helper()
	assert.NoError(t, json.Unmarshal(data, &v))
	return v
}

// wantImage reads one image back.
func (l layout) wantImage(t *testing.T, d v1.Descriptor, want oci.Image) {
	t.Helper()
	m := decode[v1.Manifest](t, l.blob(t, d))
	c := decode[v1.Image](t, l.blob(t, m.Config))
	if diff := cmp.Diff(&v1.Platform{Architecture: want.Arch, OS: "linux"}, d.Platform); diff != "" {
		t.Error(diff)
	}
	got := oci.Image{
		Name: name, Arch: c.Architecture, Layers: want.Layers, Entrypoint: c.Config.Entrypoint, Cmd: c.Config.Cmd, Env: c.Config.Env,
		WorkingDir: c.Config.WorkingDir, Labels: c.Config.Labels,
	}
	if diff := cmp.Diff(want, got); diff != "" || c.OS != "linux" || c.RootFS.Type != "layers" || m.SchemaVersion != 2 {
		t.Errorf("%+v\n%+v\n%s", m, c, diff)
	}
	wantLayers := []map[string]entry{
		{
			"lib": {"2", 0o777, "usr/lib"}, "program": {"0", 0o755, "program for " + want.Arch}, "tmp/": {"5", 0o777, ""},
			"usr/": {"5", 0o755, ""}, "usr/lib/": {"5", 0o755, ""}, "usr/lib/" + want.Arch + ".so": {"0", 0o644, "library"},
		},
		{"tmp/": {"5", 0o755, ""}, "tmp/there": {"0", 0o600, ""}, "usr/": {"5", 0o755, ""}, "usr/lib/": {"5", 0o755, ""}, "usr/lib/second.so": {"0", 0o644, "second"}},
	}
	var layers []map[string]entry
	for i, d := range m.Layers {
		r := assert.Must(gzip.NewReader(bytes.NewReader(l.blob(t, d))))(t)
		data := assert.Must(io.ReadAll(r))(t)
		sum := sha256.Sum256(data)
		if string(c.RootFS.DiffIDs[i]) != "sha256:"+hex.EncodeToString(sum[:]) {
			t.Errorf("layer %d has another digest than %s", i, c.RootFS.DiffIDs[i])
		}
		names, entries := unpack(t, data)
		if !slices.IsSorted(names) {
			t.Errorf("layer %d is not sorted: %q", i, names)
		}
		layers = append(layers, entries)
	}
	assert.Equal(t, "layers", layers, wantLayers)
}

var annotations = map[string]string{"io.containerd.image.name": name, "org.opencontainers.image.ref.name": "v1.2.3"}

func TestOneArchitecture(t *testing.T) {
	l := read(t, write(t, image("arm64")))
	top := decode[v1.Index](t, []byte(l["index.json"].Content))
	if top.SchemaVersion != 2 || len(top.Manifests) != 1 || !cmp.Equal(top.Manifests[0].Annotations, annotations) {
		t.Fatalf("%+v", top)
	}
	l.wantImage(t, top.Manifests[0], image("arm64"))
}

func TestArchitectures(t *testing.T) {
	l := read(t, write(t, image("amd64"), image("arm64")))
	top := decode[v1.Index](t, []byte(l["index.json"].Content))
	if len(top.Manifests) != 1 || !cmp.Equal(top.Manifests[0].Annotations, annotations) || top.Manifests[0].MediaType != top.MediaType {
		t.Fatalf("%+v", top)
	}
	of := decode[v1.Index](t, l.blob(t, top.Manifests[0]))
	if len(of.Manifests) != 2 || of.Manifests[0].Annotations != nil {
		t.Fatalf("%+v", of)
	}
	l.wantImage(t, of.Manifests[0], image("amd64"))
	l.wantImage(t, of.Manifests[1], image("arm64"))
}

// TestReproducible checks that the bytes do not depend on time or the order of files.
func TestReproducible(t *testing.T) {
	turned := image("arm64")
	slices.Reverse(turned.Layers[0])
	if !bytes.Equal(write(t, image("amd64"), image("arm64")), write(t, image("amd64"), turned)) {
		t.Error("the same images gave other bytes")
	}
}

func TestRefused(t *testing.T) {
	untagged := image("amd64")
	untagged.Name = "localhost:5000/image"
	assert.ErrorContains(t, oci.Write(io.Discard, untagged), "has no tag")
	if err := oci.Write(full{}, image("amd64")); !errors.Is(err, errFull) {
		t.Errorf("error %v of a writer that cannot", err)
	}
}

var errFull = errors.New("disk full")

type full struct{}

func (full) Write([]byte) (int, error) { return 0, errFull }
