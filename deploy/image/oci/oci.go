// SPDX-License-Identifier: Apache-2.0

package oci

import (
	"archive/tar"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/opencontainers/image-spec/specs-go"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"
)

// File is one entry of a layer. It belongs to root. Mode has the permissions and
// may have fs.ModeDir, fs.ModeSymlink, fs.ModeSetuid, fs.ModeSetgid and
// fs.ModeSticky; a symbolic link leads to Link. Name is relative to the image's
// root; a slash at its beginning does not matter.
type File struct {
	Name string
	Mode fs.FileMode
	Data []byte
	Link string
}

// Image is a Linux image for one architecture. Name is a whole reference,
// registry/repository:tag. Arch is as in GOARCH. The lowest layer comes first;
// directories that nothing declares are made with mode 0755.
type Image struct {
	Name, Arch           string
	Layers               [][]File
	Entrypoint, Cmd, Env []string
	WorkingDir           string
	Labels               map[string]string
}

// annotationName is what runtimes of CRI call an image: containerd's annotation has the
// whole name, that of the specification the tag alone.
const annotationName = "io.containerd.image.name"

// Write writes an archive that holds the images. Those of one name, which must be
// of different architectures, become one image index.
func Write(w io.Writer, images ...Image) error {
	if len(images) == 0 {
		return errors.New("write image archive: no image given")
	}
	blobs := blobs{}
	var names []string
	byName := map[string][]v1.Descriptor{}
	for _, image := range images {
		if err := image.check(); err != nil {
			return fmt.Errorf("write image archive: %w", err)
		}
		of, err := blobs.addImage(image)
		if err != nil {
			return fmt.Errorf("write image %s for %s: %w", image.Name, image.Arch, err)
		}
		known := byName[image.Name]
		if slices.ContainsFunc(known, func(d v1.Descriptor) bool { return d.Platform.Architecture == of.Platform.Architecture }) {
			return fmt.Errorf("write image %s: given twice for %s", image.Name, image.Arch)
		}
		if known == nil {
			names = append(names, image.Name)
		}
		byName[image.Name] = append(known, of)
	}
	top := index(nil)
	for _, name := range names {
		of := byName[name]
		slices.SortFunc(of, func(a, b v1.Descriptor) int { return cmp.Compare(a.Platform.Architecture, b.Platform.Architecture) })
		one := of[0]
		if len(of) > 1 {
			var err error
			one, err = blobs.addJSON(v1.MediaTypeImageIndex, index(of))
			if err != nil {
				return fmt.Errorf("write image %s: %w", name, err)
			}
		}
		one.Annotations = map[string]string{annotationName: name, v1.AnnotationRefName: tag(name)}
		top.Manifests = append(top.Manifests, one)
	}
	return blobs.write(w, top)
}

// check reports an image that cannot be named or selected.
func (i Image) check() error {
	switch {
	case tag(i.Name) == "":
		return fmt.Errorf("image name %q has no tag; write it as registry/repository:tag", i.Name)
	case i.Arch == "":
		return fmt.Errorf("image %s has no architecture", i.Name)
	case len(i.Layers) == 0:
		return fmt.Errorf("image %s has no layers", i.Name)
	}
	return nil
}

// tag returns the text behind the last colon, unless that colon precedes a port.
func tag(name string) string {
	at := strings.LastIndexByte(name, ':')
	if at < 1 || strings.Contains(name[at:], "/") {
		return ""
	}
	return name[at+1:]
}

func index(manifests []v1.Descriptor) v1.Index {
	return v1.Index{Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: v1.MediaTypeImageIndex, Manifests: manifests}
}

// addImage adds the blobs of one image and returns the descriptor of its manifest.
func (b blobs) addImage(image Image) (v1.Descriptor, error) {
	epoch := time.Unix(0, 0).UTC() // the bytes must not depend on when they are made
	c := v1.Image{
		Created: &epoch, Platform: v1.Platform{Architecture: image.Arch, OS: "linux"},
		Config: v1.ImageConfig{
			Env: image.Env, Entrypoint: image.Entrypoint, Cmd: image.Cmd,
			WorkingDir: image.WorkingDir, Labels: image.Labels,
		},
		RootFS: v1.RootFS{Type: "layers"},
	}
	m := v1.Manifest{Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: v1.MediaTypeImageManifest}
	seen := tree{}
	for i, files := range image.Layers {
		layer, err := seen.layer(files)
		if err != nil {
			return v1.Descriptor{}, fmt.Errorf("layer %d: %w", i, err)
		}
		c.RootFS.DiffIDs = append(c.RootFS.DiffIDs, digestOf(layer))
		packed, err := compress(layer)
		if err != nil {
			return v1.Descriptor{}, fmt.Errorf("layer %d: %w", i, err)
		}
		m.Layers = append(m.Layers, b.add(v1.MediaTypeImageLayerGzip, packed))
	}
	var err error
	if m.Config, err = b.addJSON(v1.MediaTypeImageConfig, c); err != nil {
		return v1.Descriptor{}, err
	}
	d, err := b.addJSON(v1.MediaTypeImageManifest, m)
	d.Platform = &c.Platform
	return d, err
}

// write writes the layout as a tar: its marker, the index, the blobs.
func (b blobs) write(w io.Writer, top v1.Index) error {
	archive := tar.NewWriter(w)
	document, err := json.Marshal(top)
	if err != nil {
		return fmt.Errorf("write image archive: %w", err)
	}
	entries := []File{
		{Name: v1.ImageLayoutFile, Mode: 0o644, Data: []byte(`{"imageLayoutVersion":"` + v1.ImageLayoutVersion + `"}`)},
		{Name: v1.ImageIndexFile, Mode: 0o644, Data: document},
		{Name: v1.ImageBlobsDir, Mode: fs.ModeDir | 0o755},
		{Name: v1.ImageBlobsDir + "/sha256", Mode: fs.ModeDir | 0o755},
	}
	for _, hash := range slices.Sorted(maps.Keys(b)) {
		entries = append(entries, File{Name: v1.ImageBlobsDir + "/sha256/" + hash, Mode: 0o644, Data: b[hash]})
	}
	for _, e := range entries {
		if err := put(archive, e); err != nil {
			return fmt.Errorf("write image archive: %w", err)
		}
	}
	if err := archive.Close(); err != nil {
		return fmt.Errorf("write image archive: %w", err)
	}
	return nil
}
